"""What a decode step takes from the device and the host pool, and whether they have it.

A step of a request with L tokens writes token L, and copies token L-1 to the host pool. It takes device slots while
the hot buffer still grows; a request with a full buffer takes none. A step that speculates takes no device slots, for
the whole buffer was there from the first one on, and host slots for all positions that it may come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from . import upstream

#: What to change when a pool is too small.
REMEDY = {
    "device": "a smaller device_buffer_size in --hisparse-config, or a lower --max-running-requests",
    "host": "a higher host_to_device_ratio in --hisparse-config, or a lower --max-running-requests",
    "logical": "a higher host_to_device_ratio in --hisparse-config, or a lower --max-running-requests",
}


def step(coordinator: Any, reqs: Sequence[Any], ahead: int = 0) -> dict[str, int]:
    """Device and host slots that the next decode step of `reqs` takes.

    Args:
        ahead: positions past its tokens for which a step that speculates has slots; 0 without speculation.
    """
    c = coordinator
    slots, lengths = [upstream.slot(req) for req in reqs], [upstream.allocated_len(req) for req in reqs]
    if ahead:
        held = [upstream.host_slots_held(c, req) for req in reqs]
        return {"device": 0, "host": sum(map(partial(_drafted, c, ahead), reqs, lengths, held))}
    buffers, whole = c.req_device_buffer_size[slots].tolist(), int(c.padded_buffer_size)
    growing = [(tokens, size) for tokens, size in zip(lengths, buffers, strict=True) if size < whole]
    device = sum(max(0, hot_buffer(c, tokens + 1) - size) for tokens, size in growing)
    return {"device": device, "host": _copied(c, slots, lengths)}


def _drafted(coordinator: Any, ahead: int, req: Any, tokens: int, held: int) -> int:
    """Host slots to take so that every position of a step has one; they come in pages."""
    most, length = int(coordinator.req_to_host_pool.shape[1]), max(tokens, upstream.committed_len(req) + ahead)
    return max(0, min(upstream.paged(coordinator, length), most) - held)


def _copied(coordinator: Any, slots: Sequence[Any], lengths: Sequence[int]) -> int:
    """Host slots for the copies of requests' last tokens; DeepSeek-V4 keeps one row per few tokens."""
    ratio, skips = getattr(coordinator, "compress_ratio", 1), coordinator._skip_first_backup
    last = [(slot, n // ratio) for slot, n in zip(slots, lengths, strict=True) if not skips[slot] and not n % ratio]
    return upstream.host_missing(coordinator, [slot for slot, _ in last], [rows for _, rows in last])


def hot_buffer(coordinator: Any, tokens: int) -> int:
    """Device slots of the hot buffer of a request of `tokens` tokens.

    It is whole from the start under speculation and for DeepSeek-V4.
    """
    c = coordinator
    paged = upstream.paged(c, tokens)
    whole = paged >= c.device_buffer_size or getattr(c, "is_dsv4_hisparse", False) or upstream.speculates(c)
    return int(c.padded_buffer_size) if whole else paged


def lacking(coordinator: Any, needed: dict[str, int]) -> list[str]:
    """The pools that have fewer free slots than `needed`."""
    pools = upstream.pools(coordinator)
    return [name for name, slots in needed.items() if slots > pools[name].available_size()]


def too_small(coordinator: Any, names: Iterable[str]) -> str:
    """For the client: which pools were too small, and what the operator can change."""
    pools = upstream.pools(coordinator)
    return "; ".join(
        f"HiSparse's {name} pool of {pools[name].size} slots has no room for it: give the server {REMEDY[name]}"
        for name in names
    )
