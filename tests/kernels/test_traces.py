"""Random traces, every step compared with the oracle: all tables, all outputs, every byte of the device cache."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world import Graph, World

from sglang_hisparse_plugin.kernels import reference

INDEX_TYPES = [torch.int32, torch.int64]


@st.composite
def traces(draw):
    """A small world and the calls made on it."""
    hot = draw(st.integers(1, 20))
    top_k = draw(st.integers(1, hot))
    context = draw(st.integers(1, 60))
    item = draw(st.integers(1, 20))
    requests = draw(st.integers(1, 3))
    page = draw(st.integers(0, 4))
    world = {
        "requests": requests,
        "context": context,
        "top_k": top_k,
        "hot": hot,
        "page": page,
        "item": item,
        "stride": item + draw(st.integers(0, 5)),
        "offset": draw(st.integers(0, 3)),
        "index_dtype": draw(st.sampled_from(INDEX_TYPES)),
        "length_dtype": draw(st.sampled_from(INDEX_TYPES)),
        "seed": draw(st.integers(0, 1000)),
    }
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        batch = draw(st.permutations(range(requests)))[: draw(st.integers(1, requests))]
        lengths = [draw(st.integers(1, context)) for _ in batch]
        steps.append(
            {
                "requests": batch,
                "top_k": [
                    draw(st.lists(st.integers(-1, length), min_size=top_k, max_size=top_k)) for length in lengths
                ],
                "seq_lens": lengths,
                "real": draw(st.none() | st.integers(0, len(batch))),
                "tails": draw(st.none() | st.just([draw(st.integers(0, length)) for length in lengths])),
                "plan": draw(st.booleans()),
                "counters": draw(st.booleans()),
                "skip_io": draw(st.booleans()),
            }
        )
    return world, steps


@settings(max_examples=400, deadline=None)
@given(traces())
def test_reference_equals_oracle(trace) -> None:
    options, steps = trace
    world = World(**options)
    for step in steps:
        world.step(reference.swap_in, **step)


def run(world: World, op, steps: int, *, batch: int | None = None, low: int = 1) -> None:
    """`steps` decode-like calls: lengths grow, selections drift, options come and go."""
    rng = random.Random(world.requests * 7919 + steps)
    lengths = [rng.randint(low, world.context - steps) for _ in range(world.requests)]
    for request, length in enumerate(lengths):
        if length <= world.hot:
            world.fill_in_order(request)
    for step in range(steps):
        lengths = [length + 1 for length in lengths]
        rows = rng.sample(range(world.requests), batch or rng.randint(1, world.requests))
        world.step(
            op,
            rows,
            [world.choose(lengths[r], junk=0.0 if step % 3 == 0 else 0.1) for r in rows],
            [lengths[r] for r in rows],
            real=rng.choice([None, len(rows), rng.randint(0, len(rows))]),
            tails=None if step % 4 else [max(0, lengths[r] - rng.randint(0, world.page)) for r in rows],
            plan=step % 2 == 0,
            counters=step % 5 == 0,
        )


@pytest.mark.parametrize(("item", "stride", "offset"), [(16, 16, 0), (7, 9, 1)])
def test_hundreds_of_steps(op, device, item, stride, offset) -> None:
    """Across the border between the short and the long path, with slots evicted many times over."""
    world = World(requests=3, context=1000, top_k=33, hot=100, item=item, stride=stride, offset=offset, device=device)
    run(world, op, 300)


# Rows of every alignment class, with gaps and without; 584 = 8 mod 16.
ROWS = [(656, 656, 0), (576, 576, 0), (584, 584, 0), (584, 592, 0), (1152, 1152, 16), (100, 100, 0), (66, 66, 2)]
ROWS += [(33, 33, 1), (1, 1, 0), (17, 32, 0), (15, 16, 0), (16, 48, 16)]


@pytest.mark.parametrize(("item", "stride", "offset"), ROWS)
def test_rows_of_any_size(op, device, item, stride, offset) -> None:
    world = World(requests=2, context=400, top_k=64, hot=128, item=item, stride=stride, offset=offset, device=device)
    run(world, op, 6, batch=2, low=200)


@pytest.mark.parametrize("index_dtype", INDEX_TYPES)
@pytest.mark.parametrize("length_dtype", INDEX_TYPES)
def test_index_types(op, device, index_dtype, length_dtype) -> None:
    world = World(
        requests=3, context=400, top_k=64, hot=128, device=device, index_dtype=index_dtype, length_dtype=length_dtype
    )
    run(world, op, 4)


SIZES = [(2048, 4096, 9000), (2048, 6144, 9000), (512, 1001, 9000), (1000, 32768, 40000), (4, 6, 300), (64, 4608, 9000)]
SIZES += [(4096, 8192, 17000), (8200, 8300, 17000)]


@pytest.mark.parametrize(("top_k", "hot", "context"), SIZES)
def test_sizes(op, device, top_k, hot, context) -> None:
    """What is deployed, sizes that are no multiple of anything, one of which a warp of one block has nine words, one
    that has half the table in one block, one whose table has no bit left to tell that a token is negative."""
    world = World(requests=2, context=context, top_k=top_k, hot=hot, item=16, device=device)
    run(world, op, 4, batch=2, low=hot + 1)


def test_tokens_of_one_bucket(op, device) -> None:
    """The kernel's table has at most 2^15 buckets and a token's lower bits name one: here all tokens share it."""
    world = World(requests=1, context=66 << 14, top_k=64, hot=128, item=1, device=device)
    for step in range(4):
        tokens = [(k % (64 - 5 * step)) << 14 for k in range(64)]  # from the second step on some are repeated
        world.rng.shuffle(tokens)
        world.step(op, [0], [tokens], [world.context])


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "hot", "context"), SIZES[:2])
def test_graph_replay(op, device, top_k, hot, context) -> None:
    if device == "cpu":
        pytest.skip("the torch op cannot be captured")
    world = World(requests=4, context=context, top_k=top_k, hot=hot, item=656, device=device)
    graph = None
    for step, real in enumerate([4, 4, 3, 0, 4, 1]):
        lengths = [hot + 10 + step, context, hot - 3, context - step]
        selected = [world.choose(length, junk=0.05) for length in lengths]
        call = world.call([0, 1, 2, 3], selected, lengths, real=real, counters=True)
        graph = graph or Graph(op, [call])
        graph.replay([call])
        world.expect(call)
        world.compare()
