"""Where speculation meets HiSparse: each function stands around one of SGLang's. Inert without speculation."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from .. import upstream

# --- start ---


def initialize(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """The draft runner gets a plain pool; what cannot be served is refused before weights are loaded."""
    if _speculates(runner):
        from . import limits

        with limits.ends_the_process():
            limits.check_arguments(runner.server_args)
            limits.check_model(runner)
        if runner.is_draft_worker:
            runner.enable_hisparse = False
    return original(runner, *args, **kwargs)


def init_pools(original: Any, runner: Any) -> Any:
    """The draft pool is indexed by logical slots, of which there are more than device rows."""
    if runner.is_draft_worker and _speculates(runner):
        runner.max_total_num_tokens = runner.token_to_kv_pool_allocator.size_full
    return original(runner)


def coordinator_init(original: Any, coordinator: Any, *args: Any, **kwargs: Any) -> None:
    """The coordinator of a server that speculates knows where draft tokens live."""
    original(coordinator, *args, **kwargs)
    steps = upstream.draft_tokens()
    if steps:
        from . import limits
        from .rows import VerifyRows

        with limits.ends_the_process():
            limits.check_pools(coordinator, steps)
        coordinator.verify_rows = VerifyRows(coordinator, steps)


# --- a request's life ---


def process_batch_result_prefill(original: Any, processor: Any, batch: Any, result: Any) -> Any:
    """What the draft model left is kept with each request that is staged."""
    answer = original(processor, batch, result)
    if _rows(processor.hisparse_coordinator):
        from . import relay

        relay.keep(batch, result)
    return answer


def collect_ready_reqs(original: Any, coordinator: Any) -> Any:
    """A prompt stays staged while the device pool has no room for its buffer; others pass it."""
    rows = _rows(coordinator)
    if not rows:
        return original(coordinator)
    room = coordinator.token_to_kv_pool_allocator.hisparse_attn_allocator.available_size()
    now: list[Any] = []
    later: list[Any] = []
    for act in coordinator.ack_staging_queue:
        missing = rows.missing(upstream.allocated_len(act.req))
        (now if missing <= room else later).append(act)
        room -= missing if missing <= room else 0
    coordinator.ack_staging_queue = now
    ready = original(coordinator)
    coordinator.ack_staging_queue += later
    return ready


def alloc_device_buffer(original: Any, coordinator: Any, req: Any) -> Any:
    """A request has its whole buffer from its first step on."""
    result = original(coordinator, req)
    if rows := _rows(coordinator):
        rows.open(upstream.slot(req), upstream.allocated_len(req))
    return result


def build_decode_batch(original: Any, scheduler: Any, reqs: Any) -> Any:
    """Requests that leave staging bring their draft input."""
    if not _rows(scheduler.hisparse_coordinator):
        return original(scheduler, reqs)
    from . import relay

    with upstream.relay_untouched(scheduler):
        batch = original(scheduler, reqs)
    upstream.hand_over_draft(scheduler, batch, relay.join(reqs))
    return batch


def request_finished(original: Any, coordinator: Any, req: Any) -> Any:
    """Host slots of tokens that were never accepted are freed with the others."""
    rows, slot = _rows(coordinator), upstream.slot(req)
    if rows and slot is not None:
        rows.close(slot, upstream.allocated_len(req))
    return original(coordinator, req)


# --- a step ---


def check_decode_mem(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A step takes logical slots and no device rows: a full device pool is no reason to retract."""
    with _logical(batch.hisparse_coordinator, batch, batch.tree_cache):
        return original(batch, *args, **kwargs)


def prepare_for_decode(original: Any, *args: Any) -> Any:
    """SGLang's spec v2 takes slots for the next steps ahead of them. The batch is its last argument."""
    batch = args[-1]
    with _logical(batch.hisparse_coordinator, batch.tree_cache):
        result = original(*args)
    if rows := _rows(batch.hisparse_coordinator):
        rows.prepare((upstream.slot(req), upstream.allocated_len(req)) for req in batch.reqs)
    return result


def draft_v1(original: Any, worker: Any, batch: Any) -> Any:
    """Spec v1 takes slots for the draft model's steps and gives them back."""
    if _rows(batch.hisparse_coordinator):
        # The draft model's pass after it wants a list, and replaces its numbers; without HiSparse a prefill leaves one.
        batch.prefix_lens = [0] * batch.batch_size()
    with _logical(batch.hisparse_coordinator, worker, batch.tree_cache):
        return original(worker, batch)


def verify_v1(original: Any, worker: Any, batch: Any, *drafts: Any) -> Any:
    """Spec v1 takes slots for the draft tokens, and gives back what was rejected."""
    if (rows := _rows(batch.hisparse_coordinator)) and not batch.forward_mode.is_idle():
        lengths = zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
        rows.prepare((upstream.slot(req), length + rows.steps) for req, length in lengths)
    with _logical(batch.hisparse_coordinator, worker, batch.tree_cache):
        return original(worker, batch, *drafts)


def forward_batch_generation(original: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """A verification: draft tokens go to the tail before it and to their places after it."""
    rows = _rows(worker.model_runner.hisparse_coordinator)
    if not rows or not kwargs.get("is_verify"):
        return original(worker, *args, **kwargs)
    batch = next(each for each in (kwargs.get("forward_batch"), *args) if each is not None)
    if batch.forward_mode.is_idle():
        return original(worker, *args, **kwargs)
    rows.bind(batch)
    result = original(worker, *args, **kwargs)
    rows.settle(batch)
    return result


def forward_extend(  # noqa: PLR0917 (SGLang's)
    original: Any, backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """The queries of a verification attend to device rows; SGLang translates positions only when it decodes."""
    holder = _holder(backend, forward_batch)
    rows = _rows(holder.hisparse_coordinator)
    if not rows or not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    kwargs["topk_indices"] = rows.swap_in(layer.layer_id, forward_batch, kwargs["topk_indices"])
    with _without(holder, "hisparse_coordinator"):
        return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)


def get_indexer_metadata(original: Any, backend: Any, layer_id: Any, batch: Any) -> Any:
    """The indexer answers a verification with positions, as it does a decode step."""
    metadata = original(backend, layer_id, batch)
    if _rows(_holder(backend, batch).hisparse_coordinator) and batch.forward_mode.is_target_verify():
        return dataclasses.replace(metadata, force_unfused_topk=True)
    return metadata


# --- helpers ---


def _speculates(runner: Any) -> bool:
    from . import limits

    return bool(runner.server_args.enable_hisparse) and limits.asked(runner.server_args)


def _rows(coordinator: Any) -> Any:
    return getattr(coordinator, "verify_rows", None)


def _holder(backend: Any, batch: Any) -> Any:
    """Where attention looks for the coordinator: in the forward batch at first, in the backend of later releases."""
    return backend if hasattr(backend, "hisparse_coordinator") else batch


@contextlib.contextmanager
def _logical(coordinator: Any, *holders: Any) -> Iterator[None]:
    """Meanwhile `holders` allocate and free logical slots alone, with speculation; otherwise nothing changes."""
    if not _rows(coordinator):
        yield
        return
    whole = coordinator.token_to_kv_pool_allocator
    for holder in holders:
        holder.token_to_kv_pool_allocator = whole.logical_attn_allocator
    try:
        yield
    finally:
        for holder in holders:
            holder.token_to_kv_pool_allocator = whole


@contextlib.contextmanager
def _without(holder: Any, name: str) -> Iterator[None]:
    value = getattr(holder, name)
    setattr(holder, name, None)
    try:
        yield
    finally:
        setattr(holder, name, value)
