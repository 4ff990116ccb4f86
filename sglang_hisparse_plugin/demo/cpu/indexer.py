"""The DSA indexer in plain torch: the model's own weights, the real pool's index-key buffer, float8 and all."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

FP8_MAX = 448.0  #: of float8 e4m3
PAGE = 64  #: tokens of a page of index keys


def adapt(module: ModuleType) -> None:
    """Give SGLang's `Indexer` the forward pass that its CPU dispatch looks for."""
    module.Indexer.forward_native = forward


def adapt_lengths(module: ModuleType) -> None:
    """Set the expansion of sequence lengths, whose launcher insists on CUDA tensors."""
    module.seqlens_expand_triton = seqlens_expand_triton  # type: ignore[attr-defined]


def seqlens_expand_triton(extend_seq_lens: Any, seq_lens: Any, total_len: int, max_q_len: int) -> Any:
    """What each new token may see: (total_len,) int32, for a request of 9 tokens with 3 new ones 7, 8, 9.

    Args:
        extend_seq_lens: (requests,) int, new tokens. seq_lens: (requests,) int, all tokens.
    """
    import torch

    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    return torch.tensor([seq - new + 1 + i for new, seq in pairs for i in range(new)], dtype=torch.int32)


def _context(indexer: Any, forward_batch: Any) -> tuple[Any, Any]:
    """The attention backend and the KV pool of this pass; from 0.5.15 on they are no longer the batch's."""
    module = sys.modules[type(indexer).__module__]
    if hasattr(module, "get_attn_backend"):
        return module.get_attn_backend(), module.get_token_to_kv_pool()
    return forward_batch.attn_backend, forward_batch.token_to_kv_pool


def forward(  # noqa: PLR0917 (SGLang's signature)
    self: Any, x: Any, q_lora: Any, positions: Any, forward_batch: Any, layer_id: int, return_indices: bool = True
) -> Any:
    """Store the new tokens' index keys and select `index_topk` tokens for each query.

    The Hadamard rotation is left out: it changes neither a dot product nor, for long, a rounding error.

    Args:
        x: (tokens, hidden) bfloat16. q_lora: (tokens, q_lora_rank) bfloat16. positions: (tokens,) int64.

    Returns:
        (tokens, index_topk) int32, as positions or as pool rows, whichever SGLang's `topk_transform` was asked for.
    """
    backend, pool = _context(self, forward_batch)
    metadata = backend.get_indexer_metadata(layer_id, forward_batch)
    query = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    key = self.k_norm(self.wk(x)[0])
    rope = slice(0, self.rope_head_dim)
    rotated = self.rotary_emb(positions, query[..., rope], key[:, None, rope])
    query[..., rope], key[:, rope] = rotated[0].flatten(0, -3), rotated[1].flatten(0, -2)
    gates = x.float() @ self.weights_proj.weight.float().T

    pages = pool.get_index_k_with_scale_buffer(layer_id=layer_id)
    _store(pages, forward_batch.out_cache_loc, key)
    if not return_indices:
        return None
    return metadata.topk_transform(_logits(query, gates, pages, metadata), self.index_topk)


def _store(pages: Any, locations: Any, key: Any) -> None:
    """Quantise as SGLang does: float8, one power-of-two scale per key. A page is all its keys, then all its scales."""
    import torch

    scale = torch.exp2(torch.ceil(torch.log2(key.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX)))
    keys, scales = _fields(pages, key.shape[-1])
    page, offset = locations // PAGE, locations % PAGE
    keys[page, offset] = (key.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    scales[page, offset] = scale.view(torch.uint8)


def _fields(pages: Any, head_dim: int) -> tuple[Any, Any]:
    """Views (pages, PAGE, head_dim) and (pages, PAGE, 4) of the bytes of an index-key buffer."""
    split = PAGE * head_dim
    return pages[:, :split].unflatten(1, (PAGE, head_dim)), pages[:, split:].unflatten(1, (PAGE, 4))


def _logits(query: Any, gates: Any, pages: Any, metadata: Any) -> Any:
    """(tokens, longest context) float32; columns count from the start of each token's own request."""
    import torch

    tables = metadata.get_page_table_64().long()
    dsa = hasattr(metadata, "get_dsa_extend_len_cpu")  # renamed in 0.5.15
    counts = metadata.get_dsa_extend_len_cpu() if dsa else metadata.get_nsa_extend_len_cpu()
    if len(tables) == len(query):  # speculative verification has a table for each token
        counts = [1] * len(tables)
    logits = torch.full((query.shape[0], tables.shape[1] * PAGE), float("-inf"))
    keys, scales = _fields(pages, query.shape[-1])
    start = 0
    for table, count in zip(tables, counts, strict=True):
        rows = slice(start, start + count)
        key = keys[table].view(torch.float8_e4m3fn).float() * scales[table].contiguous().view(torch.float32)
        scores = torch.einsum("thd,kd->thk", query[rows].float(), key.flatten(0, 1)).relu()
        logits[rows] = torch.einsum("thk,th->tk", scores, gates[rows])
        start += count
    return logits
