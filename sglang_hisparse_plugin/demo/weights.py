"""Weights that walk (`language`): written down, not trained.

Each of two layers looks up the same row: the first takes the high digit of the answer from it, the second the low one.
The next-token layer (MTP, the draft of speculative decoding) does all of it in one layer, on a KV cache of its own,
from the last token alone: so it proposes what the model will find. `Draft` has versions of it that are wrong on
purpose; the model's answer does not depend on it.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Any

from .language import BASE, CONTENTS, FIRST_LAP, KEYS, PROMPT, RESERVED, TAGS, VOCABULARY, Edge
from .sizes import Dims


class Draft(Enum):
    """A next-token layer, by how many of the BASE low digits it gets wrong."""

    RIGHT = 0
    HALF = BASE // 2  #: drafts are accepted and rejected in turns that nobody can foresee
    WRONG = BASE  #: every draft is rejected


CODE = 64  #: length of an address code, entries +-1 that sum to zero
OVERLAP = 28  #: the largest dot product of two different codes (CODE with itself)
SHARPNESS = 8.0  #: of attention: exp(-SHARPNESS * (CODE - OVERLAP) * softmax scale) is what a wrong row weighs
EXPERTS = 16  #: of the next-token layer, all zero
DIGIT = 8.0  #: of a one-hot entry, so that it weighs in RMS norms as much as a code

# Subspaces of a KV cache row and of the hidden state, as slices.
ROW_CODE, ROW_DIGIT = slice(0, CODE), slice(CODE, CODE + BASE)  # the next-token layer has a second digit behind it
WANTED = slice(0, CODE)  # code of the address to look up
ADDRESS = slice(CODE, 2 * CODE)  # code of the token's own address
OWN = (slice(128, 160), slice(160, 192))  # the token's digits: high, low
FOUND = (slice(192, 224), slice(224, 256))  # digits found by layer 0, by layer 1
NEXT_TAG = slice(256, 258)  # one-hot, of the token to be written
EMBEDDING = 2 * CODE + 3 * DIGIT**2  # squared length of an edge's embedding


def address_codes(seed: int = 0) -> Any:
    """(TAGS * KEYS, CODE) float32 of +-1, each row summing to 0, any two rows with a dot product of at most OVERLAP."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    codes = torch.empty(0, CODE)
    half = torch.cat([torch.ones(CODE // 2), -torch.ones(CODE // 2)])
    while len(codes) < TAGS * KEYS:
        code = half[torch.randperm(CODE, generator=generator)]
        if not len(codes) or (codes @ code).max() <= OVERLAP:
            codes = torch.cat([codes, code[None]])
    return codes


def content_digits(seed: int = 0) -> list[tuple[int, int]]:
    """High and low digit of every content; shuffled, so that neither says anything about the key."""
    numbers = list(range(CONTENTS))
    random.Random(seed).shuffle(numbers)
    return [divmod(number, BASE) for number in numbers]


def halves(digit: Any) -> tuple[Any, Any]:
    """What the first half of the heads tells of a digit, and what the second.

    A digit stands only where both agree. So a wrong row that one of two tensor-parallel ranks reads is not outvoted.
    """
    return digit // 4, digit % 4


def differ(one: int, other: int) -> bool:
    """Whether each half of the heads can tell these digits apart."""
    return all(a != b for a, b in zip(halves(one), halves(other), strict=True))


def tensors(dims: Dims, draft: Draft = Draft.RIGHT) -> dict[str, Any]:
    """Every weight by its Hugging Face name, bfloat16 (the index key norm and the router's bias float32)."""
    import torch

    weights = {"model.norm.weight": torch.ones(dims.hidden)}
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = _vocabulary(dims)
    found = [(0,), (1,), *[()] * (dims.layers - 2)]  # layers behind the second attend, too, but add nothing
    layers = [_attention(dims, digits) | _no_mlp(dims, "mlp") for digits in found]
    for number, layer in enumerate([*layers, _next_token_layer(dims, draft)]):
        weights |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    return {
        name: tensor.to(torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }


_FLOAT32 = ("k_norm.weight", "k_norm.bias", "e_score_correction_bias")


def _vocabulary(dims: Dims) -> tuple[Any, Any]:
    import torch

    codes, digits = address_codes(), content_digits()
    embed, head = torch.zeros(VOCABULARY, dims.hidden), torch.zeros(VOCABULARY, dims.hidden)
    for token in range(RESERVED, VOCABULARY):
        edge = Edge.of(token)
        embed[token, WANTED] = codes[edge.wanted]
        embed[token, ADDRESS] = codes[edge.address]
        embed[token, NEXT_TAG.start + edge.next_tag - FIRST_LAP] = DIGIT
        for own, found, digit in zip(OWN, FOUND, digits[edge.content], strict=True):
            embed[token, own.start + digit] = DIGIT
            if edge.tag != PROMPT:
                head[token, found.start + digit] = 1.0
        if edge.tag != PROMPT:
            head[token, NEXT_TAG.start + edge.tag - FIRST_LAP] = 1.0
    return embed, head


def _next_token_layer(dims: Dims, draft: Draft) -> dict[str, Any]:
    """Both digits in one layer; its input is the last token's embedding, the model's hidden state plays no role."""
    import torch

    eye = torch.eye(dims.hidden)
    weights = {
        "enorm.weight": torch.full((dims.hidden,), (EMBEDDING / dims.hidden) ** 0.5),  # undoes the norm's division
        "hnorm.weight": torch.ones(dims.hidden),
        "eh_proj.weight": torch.cat([eye, torch.zeros_like(eye)], dim=1),
        "shared_head.norm.weight": torch.ones(dims.hidden),
    }
    weights |= _attention(dims, digits=(0, 1))
    low = weights["self_attn.o_proj.weight"][FOUND[1]]
    low[: draft.value] = low[: draft.value].roll(1, 0)
    # SGLang makes this layer a mixture of experts, whatever the configuration says of the others.
    weights |= _no_mlp(dims, "mlp.shared_experts")
    for expert in range(EXPERTS):
        weights |= _no_mlp(dims, f"mlp.experts.{expert}")
    weights["mlp.gate.weight"] = torch.zeros(EXPERTS, dims.hidden)
    weights["mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    return weights


def _no_mlp(dims: Dims, name: str) -> dict[str, Any]:
    import torch

    return {
        f"{name}.gate_proj.weight": torch.zeros(dims.intermediate, dims.hidden),
        f"{name}.up_proj.weight": torch.zeros(dims.intermediate, dims.hidden),
        f"{name}.down_proj.weight": torch.zeros(dims.hidden, dims.intermediate),
    }


def _attention(dims: Dims, digits: tuple[int, ...]) -> dict[str, Any]:
    """Attention, indexer and norms of a layer that finds these digits (0 the high one, 1 the low one)."""
    import torch

    def zeros(*shape: int) -> Any:
        return torch.zeros(*shape)

    code, ones = torch.eye(CODE), torch.eye(BASE)
    q_a = zeros(dims.q_lora_rank, dims.hidden)
    q_a[:CODE, WANTED] = code
    q_b = zeros(dims.heads, dims.qk_nope_head_dim + dims.rope, dims.q_lora_rank)
    q_b[:, :CODE, :CODE] = code * SHARPNESS

    # A row of the KV cache: address code, then this layer's digits. Nothing in the rotary part: position plays no role.
    kv_a = zeros(dims.kv_lora_rank + dims.rope, dims.hidden)
    kv_a[ROW_CODE, ADDRESS] = code
    kv_b = zeros(dims.heads, dims.qk_nope_head_dim + dims.v_head_dim, dims.kv_lora_rank)
    kv_b[:, :CODE, ROW_CODE] = code
    o = zeros(dims.hidden, dims.heads, dims.v_head_dim)
    for i, digit in enumerate(digits):
        row, value = _behind(ROW_CODE.stop, i), _behind(0, i)
        kv_a[row, OWN[digit]] = ones
        kv_b[:, _behind(dims.qk_nope_head_dim, i), row] = ones
        for heads, told in enumerate(halves(torch.arange(BASE))):
            votes = 2.0 * (told[:, None] == told) - 1
            o.unflatten(1, (2, -1))[FOUND[digit], heads, :, value] = votes[:, None] / dims.heads

    # The indexer asks the same question. Rotary entries come first and stay zero, LayerNorm's weight sees to it.
    nope = slice(dims.rope, dims.rope + CODE)
    index_q = zeros(dims.index_heads, dims.index_head_dim, dims.q_lora_rank)
    index_q[:, nope, :CODE] = code
    index_k = zeros(dims.index_head_dim, dims.hidden)
    index_k[nope, ADDRESS] = code
    index_norm = zeros(dims.index_head_dim)
    index_norm[nope] = 1.0
    gates = zeros(dims.index_heads, dims.hidden)
    gates[:, NEXT_TAG] = 1.0

    return {
        "input_layernorm.weight": torch.ones(dims.hidden),
        "self_attn.q_a_proj.weight": q_a,
        "self_attn.q_a_layernorm.weight": torch.full((dims.q_lora_rank,), (CODE / dims.q_lora_rank) ** 0.5),
        "self_attn.q_b_proj.weight": q_b.flatten(0, 1),
        "self_attn.kv_a_proj_with_mqa.weight": kv_a,
        # entries of a row keep their size whatever the rank: this undoes the norm's division
        "self_attn.kv_a_layernorm.weight": torch.full(
            (dims.kv_lora_rank,), ((CODE + len(digits) * DIGIT**2) / dims.kv_lora_rank) ** 0.5
        ),
        "self_attn.kv_b_proj.weight": kv_b.flatten(0, 1),
        "self_attn.o_proj.weight": o.flatten(1, 2),
        "self_attn.indexer.wq_b.weight": index_q.flatten(0, 1),
        "self_attn.indexer.wk.weight": index_k,
        "self_attn.indexer.k_norm.weight": index_norm,
        "self_attn.indexer.k_norm.bias": zeros(dims.index_head_dim),
        "self_attn.indexer.weights_proj.weight": gates,
        "post_attention_layernorm.weight": torch.ones(dims.hidden),
    }


def _behind(start: int, digits: int) -> slice:
    """Where a digit is that comes after `digits` others."""
    return slice(start + digits * BASE, start + (digits + 1) * BASE)
