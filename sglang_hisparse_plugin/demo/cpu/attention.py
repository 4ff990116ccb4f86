"""Sparse attention and the DSA indexer in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adapt_flash_mla(module: ModuleType) -> None:
    """Set `flash_mla_sparse_fwd` in the `sgl_kernel.flash_mla` stub."""
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]


def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, **_: Any
) -> tuple[Any, None, None]:
    """Attention of each query over the rows it names.

    Args:
        q: (tokens, heads, dim).
        kv: (rows, 1, dim), the pool's buffer of one layer; the first `d_v` of a row are its value.
        indices: (tokens, 1, top_k) int32 rows; negative ones are skipped.

    Returns:
        (tokens, heads, d_v) in the dtype of `q`, and two Nones in place of the maxima and log-sum-exps nobody reads.
    """
    import torch

    rows = indices[:, 0].long()
    keys = kv.view(kv.shape[0], -1)[rows.clamp(min=0)].float()
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * sm_scale
    scores.masked_fill_((rows < 0).unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("thk,tkd->thd", weights, keys[..., :d_v]).to(q.dtype), None, None
