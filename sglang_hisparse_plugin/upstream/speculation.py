"""Speculative decoding, SGLang's own and this package's."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from .places import STEP_SIZES


def speculates(coordinator: Any) -> bool:
    """Whether draft tokens are verified, by SGLang (from 0.5.22) or by this package."""
    native = getattr(coordinator, "spec_swap", None)
    return hasattr(coordinator, "verify_rows") or bool(native and native.enabled)


def waits_for_device(coordinator: Any) -> bool:
    """Whether one in staging whose buffer finds no room stays there: this package's speculation sees to it."""
    return hasattr(coordinator, "verify_rows")


def scratch(coordinator: Any, slot: int | None) -> int:
    """Device slots that SGLang's own speculation, from 0.5.22, has yet to take for a request besides its buffer."""
    native = getattr(coordinator, "spec_swap", None)
    if not native or not native.enabled or slot in native._scratch_reqs:
        return 0
    return int(native.scratch_capacity)


def tokens_ahead(holder: Any) -> int:
    """Positions past its tokens for which a request has slots in a step that speculates; 0 without speculation.

    Spec v2 takes the slots of two steps at a time; spec v1, to 0.5.12 where nothing overlaps, those of one.

    Args:
        holder: a scheduler or a batch.
    """
    if holder.spec_algorithm is None or holder.spec_algorithm.is_none():
        return 0
    places = (vars(sys.modules[name]) for name in STEP_SIZES if name in sys.modules)
    once = int(next(found for place in places if (found := place.get("get_alloc_len_per_decode")))())
    v1 = not holder.enable_overlap and importlib.util.find_spec("sglang.srt.speculative.eagle_worker") is not None
    return once if v1 else 2 * once


def hand_over_draft(scheduler: Any, batch: Any, draft: Any) -> None:
    """Give a batch that starts to decode its draft input, by way of the future map where batches overlap."""
    batch.spec_info = draft
    if getattr(batch, "output_ids", None) is not None:  # to 0.5.12, where spec v2 asks the last input for its device
        batch.input_ids = batch.output_ids
    if getattr(batch, "req_pool_indices_cpu", batch) is None:  # 0.5.13 leaves it out, and looks lengths up by it
        batch.req_pool_indices_cpu = batch.req_pool_indices.cpu()
    if not scheduler.enable_overlap:
        return
    futures = scheduler.future_map
    if hasattr(futures, "alloc_future_indices"):  # to 0.5.12: a ring, in which what a prefill left is soon written over
        draft.future_indices = futures.alloc_future_indices(batch.batch_size())
        futures.store_to_map_for_new_batch(draft.future_indices, draft)
    else:  # by request slot: what the prefill left is there
        draft.future_indices = batch.req_pool_indices


@contextlib.contextmanager
def relay_untouched(scheduler: Any) -> Iterator[None]:
    """The future map keeps what it has: from 0.5.13 a batch out of staging writes its last tokens there."""
    futures = scheduler.future_map
    if not hasattr(futures, "stash"):
        yield
        return
    futures.stash = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        del futures.stash
