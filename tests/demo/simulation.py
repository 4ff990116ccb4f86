"""The model's forward pass in plain torch, written from the architecture, with the roundings of the GPU kernels.

Independent of SGLang and of its tensors' layout tricks: MLA unabsorbed, no pages, attention to what the indexer chose.
Activations are rounded to bfloat16 where the server keeps them so; index queries and keys are Hadamard-rotated and
rounded to float8 with a power-of-two scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_hisparse_plugin.demo.sizes import Dims

EPS = 1e-6


@dataclass
class Result:
    """Of the last position of a sequence."""

    logits: Tensor
    """(vocabulary,)"""
    chosen: list[Tensor]
    """Per layer: positions the indexer selected, best first."""
    scores: list[Tensor]
    """Per layer: (sequence,) index scores."""
    weights: list[Tensor]
    """Per layer: (sequence,) attention weight of each position, over all heads."""


def forward(weights: dict[str, Tensor], dims: Dims, tokens: list[int], broken: tuple[int, int] | None = None) -> Result:
    """`broken`: (layer, position) of a row of the KV cache that reads as zeros."""
    hidden = weights["model.embed_tokens.weight"][tokens].float()
    result = Result(torch.empty(0), [], [], [])
    for layer in range(dims.layers):
        row = broken[1] if broken and broken[0] == layer else None
        hidden = _layer(weights, dims, layer, hidden, broken=row, result=result)
    result.logits = _logits(weights, hidden, "model.norm.weight")
    return result


def draft(weights: dict[str, Tensor], dims: Dims, tokens: list[int]) -> int:
    """What the next-token layer proposes after `tokens`, whatever the hidden states are: here noise."""
    layer = f"model.layers.{dims.layers}"
    embedded = weights["model.embed_tokens.weight"][tokens].float()
    halves = [_rms(embedded, weights[f"{layer}.enorm.weight"]), torch.randn_like(embedded)]
    hidden = _bf16(torch.cat(list(map(_bf16, halves)), dim=1) @ weights[f"{layer}.eh_proj.weight"].float().T)
    unread = Result(torch.empty(0), [], [], [])
    hidden = _layer(weights, dims, dims.layers, hidden, broken=None, result=unread)
    return int(_logits(weights, hidden, f"{layer}.shared_head.norm.weight").argmax())


def _layer(
    weights: dict[str, Tensor], dims: Dims, layer: int, hidden: Tensor, *, broken: int | None, result: Result
) -> Tensor:
    w = {
        name.removeprefix(f"model.layers.{layer}.self_attn."): tensor.float()
        for name, tensor in weights.items()
        if name.startswith(f"model.layers.{layer}.self_attn.")
    }
    x = _bf16(_rms(hidden, weights[f"model.layers.{layer}.input_layernorm.weight"]))
    q_lora = _bf16(_rms(_bf16(x @ w["q_a_proj.weight"].T), w["q_a_layernorm.weight"]))
    score = _index_scores(w, dims, x, q_lora)
    mask, best = _select(score, dims.index_topk)
    output, weight = _attention(w, dims, x, q_lora, mask=mask, broken=broken)
    result.chosen.append(best)
    result.scores.append(score[-1])
    result.weights.append(weight)
    return _bf16(hidden + output)


def _logits(weights: dict[str, Tensor], hidden: Tensor, norm: str) -> Tensor:
    last = _bf16(_rms(hidden[-1:], weights[norm]))
    return _bf16(last @ weights["lm_head.weight"].float().T)[0]


def _index_scores(w: dict[str, Tensor], dims: Dims, x: Tensor, q_lora: Tensor) -> Tensor:
    query = _bf16(q_lora @ w["indexer.wq_b.weight"].T).unflatten(1, (dims.index_heads, dims.index_head_dim))
    key = torch.nn.functional.layer_norm(
        _bf16(x @ w["indexer.wk.weight"].T),
        (dims.index_head_dim,),
        w["indexer.k_norm.weight"],
        w["indexer.k_norm.bias"],
        EPS,
    )
    assert not query[..., : dims.rope].any() and not key[..., : dims.rope].any(), "position would play a role"
    rotation = _hadamard(dims.index_head_dim)
    query, key = _fp8(_bf16(query @ rotation)), _fp8(_bf16(key @ rotation))
    gates = x @ w["indexer.weights_proj.weight"].T
    scores = torch.zeros(len(x), len(x))
    for head in range(dims.index_heads):
        scores += (query[:, head] @ key.T).relu() * gates[:, head, None]
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))


def _select(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    values, best = scores.topk(min(top_k, len(scores)), dim=1)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, values > float("-inf"))
    return mask, best[-1]


def _attention(
    w: dict[str, Tensor], dims: Dims, x: Tensor, q_lora: Tensor, *, mask: Tensor, broken: int | None
) -> tuple[Tensor, Tensor]:
    row = _bf16(x @ w["kv_a_proj_with_mqa.weight"].T)
    assert not row[:, dims.kv_lora_rank :].any(), "position would play a role"
    latent = _bf16(_rms(row[:, : dims.kv_lora_rank], w["kv_a_layernorm.weight"]))
    if broken is not None:
        latent[broken] = 0
    width = dims.qk_nope_head_dim + dims.rope
    query = _bf16(q_lora @ w["q_b_proj.weight"].T).unflatten(1, (dims.heads, width))
    both = _bf16(latent @ w["kv_b_proj.weight"].T).unflatten(1, (dims.heads, dims.qk_nope_head_dim + dims.v_head_dim))
    heads, total = [], torch.zeros(len(x))
    for head in range(dims.heads):
        logits = query[:, head, : dims.qk_nope_head_dim] @ both[:, head, : dims.qk_nope_head_dim].T * width**-0.5
        weight = logits.masked_fill(~mask, float("-inf")).softmax(1)
        heads.append(_bf16(weight @ both[:, head, dims.qk_nope_head_dim :]))
        total += weight[-1] / dims.heads
    return _bf16(torch.cat(heads, 1) @ w["o_proj.weight"].T), total


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def _fp8(x: Tensor) -> Tensor:
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5
