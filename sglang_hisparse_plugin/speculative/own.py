"""SGLang's own verification, from 0.5.22 on, with our op for its swap-in; its coordinator keeps all tables for that.

Draft tokens lie in the extra page as they do in `rows`, and calls keep the LRU order that SGLang resets with each
request. What only its own kernel uses, a hash table and scratch rows, stays as it was when the request began: so one of
the two serves a layer, always the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import room
from .rows import VerifyRows


@dataclass
class _Verified:
    """The requests of a pass, as `VerifyRows.swap_in` wants them; at one address for ever, as a CUDA graph does."""

    rows: VerifyRows
    committed: Tensor
    """[request slots] int64, tokens before the drafts."""
    layer: int = 1 << 30
    """The last that was served."""


_passes: weakref.WeakKeyDictionary[Any, _Verified] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Batch:
    req_pool_indices: Tensor
    seq_lens: Tensor


def serves(coordinator: Any, selected: Tensor) -> bool:
    """Whether calls of the op are faster, and right: the last must not evict what the first was answered (`rows`).

    The same for all passes of a server.
    """
    steps, top_k = selected.shape[1:]
    return bool(top_k == coordinator.top_k and room.ours_verifies(steps, top_k, coordinator.device_buffer_size))


def has_answered(manager: Any) -> bool:
    """Whether calls of the op have moved rows, of which SGLang's kernel would know nothing."""
    now = _passes.get(manager)
    return bool(now and now.rows.answered)


def swap_in(
    manager: Any, *, req_pool_indices: Tensor, compressed_seq_lens: Tensor, top_k_result: Tensor, layer_id: int
) -> Tensor:
    """Device rows of what the queries of a verification selected, in one layer.

    Args:
        manager: SGLang's `HiSparseSpecSwapManager`.
        req_pool_indices: [batch] int64, request slots.
        compressed_seq_lens: [batch * steps] int32, tokens that each query sees.
        top_k_result: [batch, steps, top_k] int32, positions, -1 for none.

    Returns:
        The same shape, int32; -1 where nothing was selected.
    """
    batch, steps = top_k_result.shape[:2]
    now = _passes.get(manager) or _passes.setdefault(manager, _first(manager, steps))
    if layer_id <= now.layer:  # layers come in order, so this is the first of a pass
        by_query = compressed_seq_lens.view(batch, steps).t()
        now.rows.lengths[:, :batch] = by_query
        now.committed[:batch] = by_query[0] - 1
    now.layer = layer_id
    asked = _Batch(req_pool_indices, now.committed[:batch])
    return now.rows.swap_in(layer_id, asked, top_k_result.flatten(0, 1)).view_as(top_k_result)


def _first(manager: Any, steps: int) -> _Verified:
    rows = VerifyRows(manager._coordinator, steps)
    rows.locs = manager.top_k_device_locs  # where SGLang looks for the answers of layers that share them
    return _Verified(rows, torch.zeros(rows.lengths.size(1), dtype=torch.int64, device=rows.lengths.device))
