"""What a decode step takes from the device and the host pool, and whether they have it.

A step of a request with L tokens writes token L, and copies token L-1 to the host pool. It takes device slots while
the hot buffer still grows; a request with a full buffer takes none. A step that speculates takes no device slots, for
the whole buffer was there from the first one on, and host slots for all positions that it may come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    device = host = 0
    for req in reqs:
        slot, tokens = upstream.slot(req), upstream.allocated_len(req)
        if ahead:
            host += _drafted(coordinator, req, max(tokens, upstream.committed_len(req) + ahead))
        else:
            device += max(0, hot_buffer(coordinator, tokens + 1) - int(coordinator.req_device_buffer_size[slot]))
            host += _copied(coordinator, slot, tokens)
    return {"device": device, "host": host}


def _drafted(coordinator: Any, req: Any, length: int) -> int:
    """Host slots to take so that every position below `length` has one; they come in pages."""
    most = int(coordinator.req_to_host_pool.shape[1])
    return max(0, min(upstream.paged(coordinator, length), most) - upstream.host_slots_held(coordinator, req))


def _copied(coordinator: Any, slot: Any, tokens: int) -> int:
    """Host slots for the copy of a request's last token; DeepSeek-V4 keeps one row per few tokens."""
    ratio = getattr(coordinator, "compress_ratio", 1)
    if coordinator._skip_first_backup[slot] or tokens % ratio:
        return 0
    return upstream.host_missing(coordinator, slot, tokens // ratio)


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
