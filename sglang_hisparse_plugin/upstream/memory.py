"""The pools of device, host and logical slots: who has how many, and what is copied between them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from .places import COORDINATOR
from .requests import allocated_len, slot
from .speculation import speculates


def is_hisparse(allocator: Any) -> bool:
    """Whether this is the allocator of a HiSparse pool."""
    return hasattr(allocator, "hisparse_attn_allocator")


def pools(coordinator: Any) -> dict[str, Any]:
    """The device, host and logical pool, each with `size` and `available_size()` in slots."""
    allocator = coordinator.token_to_kv_pool_allocator
    return {
        "device": allocator.hisparse_attn_allocator,
        "host": coordinator.mem_pool_host,
        "logical": allocator.logical_attn_allocator,
    }


def free_slots(scheduler: Any) -> dict[str, int]:
    """Free slots of the device, host and logical pool; host-side bookkeeping, nothing waits for a device."""
    return {name: int(pool.available_size()) for name, pool in pools(scheduler.hisparse_coordinator).items()}


def device_tokens(allocator: Any) -> int:
    """Tokens of which the device pool holds the KV; DeepSeek-V4 keeps one row per few tokens."""
    return int(allocator.hisparse_attn_allocator.size) * int(getattr(allocator, "compress_ratio", 1))


def row_bytes(coordinator: Any) -> int:
    """Bytes of a token's row in one layer. An attribute of the coordinator from 0.5.12."""
    if hasattr(coordinator, "item_size_bytes"):
        return int(coordinator.item_size_bytes)
    return int(coordinator.mem_pool_host.token_stride_size)


def paged(coordinator: Any, tokens: int) -> int:
    """`tokens` rounded up to whole pages of the device pool."""
    page = int(coordinator.mem_pool_device.page_size)
    return -(-tokens // page) * page


def mapping_of(coordinator: Any, req: Any) -> tuple[Any, Any]:
    """The table from logical to device slots, (logical slots,) int64, and a request's positions in it, (n,) int64."""
    pool = coordinator.mem_pool_device
    logical = coordinator.req_to_token_pool.req_to_token[slot(req), : allocated_len(req)].long()
    if hasattr(pool, "translate_loc_from_full_to_compressed"):  # from 0.5.12, for one row per few tokens
        logical = pool.translate_loc_from_full_to_compressed(logical)
    return pool.full_to_hisparse_device_index_mapping, logical


def host_reserved(coordinator: Any) -> Any:
    """[request slots] on the CPU: positions of each that have a host slot. The coordinator counts them from 0.5.13."""
    return getattr(coordinator, "req_to_host_pool_allocated_len", None)


def host_slots_for(coordinator: Any, rows: int) -> int:
    """Host slots of a request with `rows` rows in the host pool."""
    if host_reserved(coordinator) is None:
        return rows
    page = int(coordinator.mem_pool_host.page_size)
    return -(-rows // page) * page


def host_slots_held(coordinator: Any, req: Any) -> int:
    """Host slots that a request has.

    To 0.5.12 SGLang does not count them: told from how far it is, or one too few; while it speculates, counted by us.
    """
    row, reserved = slot(req), host_reserved(coordinator)
    if row is None:
        return 0
    if reserved is not None:
        return int(reserved[row])
    if speculates(coordinator) and (counted := coordinator.verify_rows.reserved(row)):
        return int(counted)
    decodes = int(coordinator.req_device_buffer_size[row]) > 0
    return allocated_len(req) - decodes if decodes or getattr(req, "hisparse_staging", False) else 0


def host_missing(coordinator: Any, slots: Sequence[int], rows: Sequence[int]) -> int:
    """Host slots to allocate for requests that are about to have `rows` rows in the host pool, one more than before.

    Rows are allocated one by one to 0.5.12, page by page from 0.5.13.
    """
    reserved = host_reserved(coordinator)
    if reserved is None:
        return len(rows)
    pairs = zip(rows, reserved[slots].tolist(), strict=True)
    return sum(host_slots_for(coordinator, n) - held for n, held in pairs if n > held)


def reserve_host(coordinator: Any, slot: int, start: int, stop: int) -> None:
    """Give positions start .. stop-1 of a request host slots. The host pool has pages, and counts them, from 0.5.13.

    Raises:
        RuntimeError: the host pool is empty.
    """
    c, pool = coordinator, coordinator.mem_pool_host
    if hasattr(pool, "alloc_paged_token_slots"):
        pool.alloc_paged_token_slots(c.req_to_host_pool, c.req_to_host_pool_allocated_len, slot, start, stop - start)
        return
    rows = pool.alloc(stop - start)
    if rows is None:
        raise RuntimeError(f"HiSparse: the host pool has no room for {stop - start} draft tokens")
    c.req_to_host_pool[slot, start:stop] = rows.to(c.req_to_host_pool.device)


def free_host(coordinator: Any, slot: int, start: int, stop: int) -> None:
    """Free the host slots of positions start .. stop-1, where the host pool has no pages: up to 0.5.12."""
    c = coordinator
    if start < stop:
        rows = c.req_to_host_pool[slot, start:stop]
        c.mem_pool_host.free(rows.clone())
        rows.fill_(-1)


def back_up(coordinator: Any, host: Any, device: Any) -> None:
    """Copy device rows to host rows in all layers; `settled` waits for it. On a stream of its own from 0.5.11."""
    c = coordinator
    copy = functools.partial(
        c.mem_pool_host.backup_from_device_all_layer, c.mem_pool_device, host, device, io_backend="kernel"
    )
    if not hasattr(c, "decode_backup_stream"):
        copy()
        return
    module = sys.modules[COORDINATOR].device_module
    c.wait_for_pending_backup()
    now = module.current_stream()
    with module.stream(c.decode_backup_stream):
        c.decode_backup_stream.wait_stream(now)
        copy()
        c._backup_done_event.record()
        for rows in (host, device):
            if rows.is_cuda:
                rows.record_stream(c.decode_backup_stream)
    c._has_pending_backup = True


def settled(coordinator: Any) -> None:
    """Let the current stream wait for `back_up`."""
    if hasattr(coordinator, "wait_for_pending_backup"):
        coordinator.wait_for_pending_backup()
