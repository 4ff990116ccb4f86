"""Swap-ins of one request that follow each other at once, as a speculative verification issues them, one per draft.

Each call needs the tables that the one before it wrote, and on sm_90 is launched before that one has ended.
"""

from __future__ import annotations

import pytest
import torch
from world import Call, Graph, World

SMALL = (33, 100, 1000)
DEPLOYED = [pytest.param((2048, hot, 9000), marks=pytest.mark.gpu) for hot in (4096, 6144)]


def chain(world: World, *, steps: int, tail: bool) -> list[Call]:
    """A verification: every call asks for one token more; with a tail, the drafts lie in the extra page."""
    batch = list(range(world.requests))
    lengths = [world.rng.randint(world.hot + 1, world.context - steps) for _ in batch]
    return [
        world.call(
            batch,
            [world.choose(length + step) for length in lengths],
            [length + step for length in lengths],
            tails=lengths if tail else None,
            plan=True,
            counters=True,
        )
        for step in range(steps)
    ]


def run(op, calls: list[Call]) -> None:
    for call in calls:
        op(**call.arguments)


def check(world: World, calls: list[Call]) -> None:
    """All calls have run: the oracle makes them in this order."""
    for call in calls:
        world.expect(call)
    world.compare()


@pytest.mark.parametrize("tail", [False, True], ids=["", "tail"])
@pytest.mark.parametrize("size", [SMALL, *DEPLOYED])
@pytest.mark.parametrize("requests", [1, 3])
def test_calls_that_depend_on_each_other(op, device, requests, size, tail) -> None:
    """On a device in one CUDA graph, which is replayed with new queries."""
    top_k, hot, context = size
    world = World(requests=requests, context=context, top_k=top_k, hot=hot, item=656, page=8, device=device)
    graph = None
    for _ in range(1 if device == "cpu" else 3):
        calls = chain(world, steps=5, tail=tail)
        if device == "cpu":
            run(op, calls)
        else:
            graph = graph or Graph(op, calls)
            graph.replay(calls)
        check(world, calls)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [SMALL, *DEPLOYED])
def test_calls_without_a_graph(op, device, size) -> None:
    top_k, hot, context = size
    world = World(requests=1, context=context, top_k=top_k, hot=hot, item=656, page=8, device=device)
    run(op, warm_up := chain(world, steps=1, tail=True))
    check(world, warm_up)  # compiled by now: the next calls come fast
    calls = chain(world, steps=8, tail=True)
    run(op, calls)
    check(world, calls)


@pytest.mark.parametrize("swapped", [0, 3])
def test_one_call_too_early_is_found(op, device, swapped) -> None:
    """The control: two calls change places, as if the second had not waited for the first."""
    world = World(requests=1, context=1000, top_k=33, hot=100, page=8, device=device)
    calls = chain(world, steps=5, tail=True)
    wrong = list(calls)
    wrong[swapped : swapped + 2] = reversed(calls[swapped : swapped + 2])
    if device == "cpu":
        run(op, wrong)
    else:
        Graph(op, wrong).replay(wrong)
    with pytest.raises(AssertionError):
        check(world, calls)


def told_by_calls(world: World) -> tuple[list[Call], list[Call]]:
    """Pairs of calls: the first writes, as its answers, which request the second is for and how long that is.

    A kernel that has read this before its predecessor's end has read what the pair before was told, or nonsense.
    """
    device, nothing = world.device, [-1] * (world.top_k - 2)
    teller = World(requests=2, context=world.hot, top_k=world.top_k, hot=world.hot, device=device)
    told = torch.full((1, world.top_k), 1 << 30, dtype=torch.int32, device=device)
    calls, asked = [], []
    for request in (0, 1, 1, 0):
        length = world.context - 7 * request
        teller.locs[request, :2] = torch.tensor([request, length], device=device)
        tells = teller.call([request], [[0, 1, *nothing]], [world.hot])
        tells.arguments["top_k_device_locs"] = told
        asks = world.call([request], [world.choose(length)], [length], plan=True)
        asks.arguments.update(req_pool_indices=told[0, :1], seq_lens=told[0, 1:2])
        calls += [tells, asks]
        asked.append(asks)
    return calls, asked


@pytest.mark.parametrize("size", [SMALL, *DEPLOYED])
def test_what_a_request_is_told_by_may_be_written_by_the_call_before(op, device, size) -> None:
    top_k, hot, context = size
    world = World(requests=2, context=context, top_k=top_k, hot=hot, item=656, device=device)
    calls, asked = told_by_calls(world)
    if device == "cpu":
        run(op, calls)
    else:
        nobody = {"num_real_reqs": torch.zeros(1, dtype=torch.int32, device=device)}
        op(**asked[0].arguments | nobody)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(op, calls)
        graph.replay()
    check(world, asked)
