"""Who holds slots of a PD decode worker besides those that decode."""

from __future__ import annotations

from typing import Any

from .requests import slot


def transferred(scheduler: Any) -> list[Any]:
    """Requests that came with their KV to a PD decode worker and do not decode yet, oldest first; none elsewhere."""
    decodes = scheduler.disaggregation_mode.name == "DECODE"
    return [req for req in scheduler.waiting_queue if decodes and slot(req) is not None]


def transfers(scheduler: Any) -> bool:
    """Whether anybody on a PD decode worker holds slots that a prefill worker may write to."""
    queue = getattr(scheduler, "disagg_decode_transfer_queue", None)
    return queue is not None and bool(queue.queue or getattr(queue, "has_pending_deferred_releases", bool)())
