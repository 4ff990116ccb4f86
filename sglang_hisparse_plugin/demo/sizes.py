"""The model's sizes, for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dims:
    """Sizes that a device's kernels accept; the language and the answer do not depend on them."""

    heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_heads: int
    index_topk: int
    q_lora_rank: int = 128
    hidden: int = 384
    rope: int = 64
    index_head_dim: int = 128
    intermediate: int = 128
    layers: int = 2


CPU = Dims(heads=4, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64, index_heads=4, index_topk=32)
CUDA = Dims(
    heads=64, kv_lora_rank=512, qk_nope_head_dim=128, v_head_dim=128, index_heads=64, index_topk=2048, hidden=512
)  # the fused norm of a draft layer, from 0.5.15 on, takes multiples of 256 past 256
