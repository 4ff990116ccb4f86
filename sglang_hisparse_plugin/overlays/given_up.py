"""Which entries of a PD decode worker's queues a client has given up.

Every rank is told of an abort in the same iteration. That a receiver has failed is no such sign: sending to a prefill
worker may fail on one rank alone, and who went by that would reduce with ranks that do not.
"""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.overlay import Hook
from ..patching.source import SourceTree
from .probing import existing, expect_hookable

QUEUES = "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"


def expect_told(tree: SourceTree) -> None:
    abort = existing(upstream.scheduler_method(tree, "abort_request"), "Scheduler.abort_request")
    expect_hookable(abort, "self", "recv_req")


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Mark whom the abort means; more than one overlay may do so."""
    for name in QUEUES:
        for entry in getattr(getattr(scheduler, name, None), "queue", ()):
            if upstream.means(recv_req, entry.req):
                entry.hisparse_given_up = True
    return original(scheduler, recv_req)


def is_given_up(entry: Any) -> bool:
    return getattr(entry, "hisparse_given_up", False)


HOOK = Hook(f"{upstream.SCHEDULER}:Scheduler.abort_request", abort_request)
