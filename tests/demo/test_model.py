"""The pointer-chasing model: its language by hand, its weights by a forward pass that knows nothing of SGLang."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import draft, forward

from sglang_hisparse_plugin.demo import language, sizes, weights
from sglang_hisparse_plugin.demo.language import FIRST_LAP, HOME, LATER_LAP, PROMPT, STAGES, WIDTH, Edge
from sglang_hisparse_plugin.demo.weights import Draft

# Heads do the same; a few tell what all would.
DEVICES = {
    "cpu": (dataclasses.replace(sizes.CPU, heads=2, index_heads=2), 700),
    "cuda": (dataclasses.replace(sizes.CUDA, heads=2, index_heads=2), 2300),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tests run side by side; threads of each that wait for each other would take many times longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {device: weights.tensors(dims) for device, (dims, _) in DEVICES.items()}


@given(st.integers(language.RESERVED, language.VOCABULARY - 1))
def test_a_token_is_an_edge_and_back(token: int) -> None:
    assert Edge.of(token).token == token


def test_a_walk_by_hand() -> None:
    # keys 0, 5, 10, 14 in stages 0 to 3, then member 0 of every stage back home
    cycle = [Edge(PROMPT, 0, 1), Edge(PROMPT, 5, 2), Edge(PROMPT, 10, 2), Edge(PROMPT, 14, 0)]
    cycle += [Edge(PROMPT, stage * WIDTH, 0) for stage in range(4, STAGES)]
    distractor = Edge(PROMPT, 6, 3)
    last = Edge(PROMPT, (STAGES - 1) * WIDTH + 1, HOME)
    tokens = [edge.token for edge in [distractor, *reversed(cycle), last]]

    right = [Edge.of(token) for token in language.walk(tokens, STAGES + 2)]

    assert [(e.key, e.choice) for e in right[:4]] == [(0, 1), (5, 2), (10, 2), (14, 0)]
    assert {e.tag for e in right[:STAGES]} == {FIRST_LAP}
    assert right[STAGES:] == [Edge(LATER_LAP, 0, 1), Edge(LATER_LAP, 5, 2)]
    assert language.needed_position(tokens, 0) == len(tokens) - 2, (
        "the last but one token of the prompt is the edge at home"
    )
    assert language.needed_position(tokens, STAGES) == len(tokens), "the second lap reads what the first wrote"


@settings(max_examples=20, deadline=None)
@given(st.integers(STAGES + 1, 3000), st.integers(0, 10**6))
def test_every_key_of_the_walk_stands_in_the_prompt_once(length: int, seed: int) -> None:
    tokens = language.prompt(length, seed)
    walked = [Edge.of(token).key for token in language.walk(tokens, STAGES)]
    keys = [Edge.of(token).key for token in tokens]
    assert len(tokens) == length
    assert len(set(walked)) == STAGES
    assert all(keys.count(key) == 1 for key in walked)


def test_prompts_differ_in_their_walks() -> None:
    walks = {tuple(language.walk(language.prompt(600, seed), 20)) for seed in range(50)}
    assert len(walks) == 50


def test_too_short_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 65 tokens, not 64"):
        language.prompt(64, 0)


def test_address_codes_are_balanced_and_far_apart() -> None:
    codes = weights.address_codes()
    products = codes @ codes.T
    products.fill_diagonal_(0)
    assert codes.shape == (language.TAGS * language.KEYS, weights.CODE)
    assert not codes.sum(1).any()
    assert products.max() <= weights.OVERLAP


@pytest.mark.parametrize("device", DEVICES)
def test_forward_pass_walks_with_wide_margins(tensors: dict[str, dict[str, torch.Tensor]], device: str) -> None:
    dims, length = DEVICES[device]
    tokens = language.prompt(length, seed=7)
    right = language.walk(tokens, STAGES + 2)
    for step in (0, STAGES - 1, STAGES + 1):
        result = forward(tensors[device], dims, tokens + right[:step])
        needed = language.needed_position(tokens, step)
        best = result.logits.topk(2)
        assert best.indices[0] == right[step]
        assert best.values[1] < 0.75 * best.values[0], "the runner-up has one of three votes less"
        for chosen, scores, attended in zip(result.chosen, result.scores, result.weights, strict=True):
            others = torch.cat([scores[:needed], scores[needed + 1 :]])
            assert chosen[0] == needed
            assert others.max() < 0.6 * scores[needed]
            assert attended[needed] > 0.999


@pytest.mark.parametrize(("device", "layer"), list(itertools.product(DEVICES, (0, 1))))
def test_one_broken_row_breaks_the_step_that_needs_it(
    tensors: dict[str, dict[str, torch.Tensor]], device: str, layer: int
) -> None:
    dims, length = DEVICES[device]
    tokens = language.prompt(length, seed=8)
    right = language.walk(tokens, STAGES + 1)
    for step in (3, STAGES):  # of the prompt, of the model's own first lap
        needed = language.needed_position(tokens, step)
        broken = forward(tensors[device], dims, tokens + right[:step], broken=(layer, needed))
        other = forward(tensors[device], dims, tokens + right[:step], broken=(layer, needed - 1))
        assert broken.logits.argmax() != right[step]
        assert other.logits.argmax() == right[step]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", Draft)
def test_the_next_token_layer_proposes_what_follows_or_is_wrong_on_purpose(device: str, kind: Draft) -> None:
    dims, length = DEVICES[device]
    drafting = weights.tensors(dims, kind)
    tokens = language.prompt(length, seed=9)
    right = language.walk(tokens, STAGES + 4)
    for step in (1, 2, STAGES, STAGES + 2):
        proposed = draft(drafting, dims, tokens[1:] + right[:step])
        _, low = weights.content_digits()[Edge.of(right[step]).content]
        assert (proposed == right[step]) == (low >= kind.value)


def test_a_wrong_draft_layer_is_all_that_differs() -> None:
    dims, _ = DEVICES["cpu"]
    one, other = weights.tensors(dims), weights.tensors(dims, Draft.WRONG)
    differ = [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
    assert differ == [f"model.layers.{dims.layers}.self_attn.o_proj.weight"]


def test_layers_behind_the_second_change_no_answer() -> None:
    dims, length = DEVICES["cpu"]
    deep = dataclasses.replace(dims, layers=4)
    tokens = language.prompt(length, seed=10)
    assert forward(weights.tensors(deep), deep, tokens).logits.argmax() == language.walk(tokens, 1)[0]
