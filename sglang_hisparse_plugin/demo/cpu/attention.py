"""Sparse attention and top-k of `sgl_kernel` in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adapt_flash_mla(module: ModuleType) -> None:
    """Set the sparse attention in the `sgl_kernel.flash_mla` stub."""
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]


def adapt_top_k(module: ModuleType) -> None:
    """Set the top-k selections of the DSA indexer in the `sgl_kernel` stub."""
    for function in (fast_topk_v2, fast_topk_transform_fused):
        setattr(module, function.__name__, function)


def adapt_backend(module: ModuleType) -> None:
    """Pad a decode step as on a GPU: from 0.5.19 SGLang has another name for how on a CPU, which this backend lacks."""
    backend = module.DeepseekSparseAttnBackend
    backend.get_cpu_graph_seq_len_fill_value = backend.get_cuda_graph_seq_len_fill_value


def flash_mla_sparse_fwd(  # noqa: PLR0917 (SGLang's signature)
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    **_: Any,
) -> tuple[Any, None, None]:
    """Attention of each query over the rows it names.

    Args:
        q: (tokens, heads, dim).
        kv: (rows, 1, dim), the pool's buffer of one layer; the first `d_v` entries of a row are its value.
        indices: (tokens, 1, top_k) int32 rows; negative ones are skipped.
        attn_sink: must be None.
        topk_length: (tokens,) int32, how many of the named rows count; None: all.

    Returns:
        (tokens, heads, d_v) in the dtype of `q`, and two Nones for the maxima and log-sum-exps, which nobody reads.
    """
    import torch

    if attn_sink is not None:
        raise NotImplementedError("attention sinks have no CPU stand-in")
    rows = indices[:, 0].long()
    if topk_length is not None:
        rows = rows.masked_fill(torch.arange(rows.shape[1]) >= topk_length.unsqueeze(1), -1)
    keys = kv.view(kv.shape[0], -1)[rows.clamp(min=0)].float()
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * sm_scale
    scores.masked_fill_((rows < 0).unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("thk,tkd->thd", weights, keys[..., :d_v]).to(q.dtype), None, None


def fast_topk_v2(score: Any, lengths: Any, topk: int, row_starts: Any = None) -> Any:
    """Columns of the `topk` largest of the first `lengths[i]` scores of each row, -1 where a row is shorter.

    Args:
        score: (rows, columns) float32.
        lengths: (rows,) int32.
        row_starts: must be None: the CPU indexer gives each row its own columns from 0.

    Returns:
        (rows, topk) int32.
    """
    import torch

    if row_starts is not None:
        raise NotImplementedError("row_starts has no CPU stand-in")
    columns = torch.arange(score.shape[1])
    masked = score.masked_fill(columns >= lengths.unsqueeze(1), float("-inf"))
    values, found = masked.topk(min(topk, score.shape[1]), dim=1)
    found = found.masked_fill(values == float("-inf"), -1)
    return torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1).to(torch.int32)


def fast_topk_transform_fused(  # noqa: PLR0917 (SGLang's signature)
    score: Any, lengths: Any, page_table_size_1: Any, cu_seqlens_q: Any, topk: int, row_starts: Any = None
) -> Any:
    """`fast_topk_v2`, then the pool row of each column.

    Args:
        page_table_size_1: (requests, columns) int32, pool row of each position.
        cu_seqlens_q: (requests + 1,) int32, first row of `score` of each request.
    """
    import torch

    found = fast_topk_v2(score, lengths, topk, row_starts).long()
    request = torch.bucketize(torch.arange(score.shape[0]), cu_seqlens_q[1:].long(), right=True)
    return page_table_size_1[request.unsqueeze(1), found.clamp(min=0)].masked_fill(found < 0, -1).to(torch.int32)
