"""A request for which staging has no room goes back to the queue."""

from __future__ import annotations

import ast
from typing import Any

from .. import memory, upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..patching.syntax import ends_with
from .probing import existing, expect_hookable, probe


class Never:
    """The end of a transfer that was not begun."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Nothing comes of waiting."""


NEVER = Never()


@probe
def judge(tree: SourceTree) -> Verdict:
    admit = existing(upstream.coordinator_method(tree, "admit_request_into_staging"), "admit_request_into_staging")
    schedule = existing(upstream.scheduler_method(tree, "get_next_batch_to_run"), "Scheduler.get_next_batch_to_run")
    if schedule.calls("hisparse_coordinator.staged_without_room"):
        return Fixed("get_next_batch_to_run retracts staged requests for which there is no room")
    expect_hookable(admit, "self", "req")
    expect_hookable(schedule, "self", more=True)
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(admit.node))
    pages = any(ends_with(call.func, "alloc_paged_token_slots") for call in admit.all_calls())
    existing((raises or pages) or None, "admit_request_into_staging that raises when the host pool is full")
    return Defective("a full host or device pool at staging is found out by an exception that ends the scheduler")


def admit_request_into_staging(original: Any, c: Any, req: Any) -> Any:
    """Without room in the host pool nothing is begun; the request is queued as one whose transfer never ends."""
    rows = upstream.allocated_len(req) // getattr(c, "compress_ratio", 1)
    if not memory.lacking(c, {"host": upstream.host_slots_for(c, rows)}):
        return original(c, req)
    req.hisparse_staging = True
    c.ack_staging_queue.append(upstream.act(NEVER, req))
    return None


def get_next_batch_to_run(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Retract requests in staging that were not begun, or whose hot buffer the device pool has no room for."""
    c = scheduler.hisparse_coordinator
    if c is not None and c.ack_staging_queue:
        upstream.retract(scheduler, list(_without_room(c)))
    return original(scheduler, *args, **kwargs)


def _without_room(c: Any) -> Any:
    room = upstream.pools(c)["device"].available_size()
    for act in c.ack_staging_queue:
        tokens = upstream.allocated_len(act.req)
        missing = max(0, memory.hot_buffer(c, tokens) - upstream.paged(c, tokens // getattr(c, "compress_ratio", 1)))
        missing = 0 if upstream.waits_for_device(c) else missing + upstream.scratch(c, upstream.slot(act.req))
        if act.finish_event is NEVER or missing > room:
            yield act.req
        else:
            room -= missing


OVERLAY = Overlay(
    id="staging-memory",
    symptom="the server dies when a prompt that was admitted no longer fits into the host or the device pool",
    why=(
        "Host slots are taken when a prefill is done and device slots when its transfer has ended; what was free when "
        "the prompt was admitted may be gone by then. Both are found out by an exception that ends the scheduler and "
        "leaves half of the state behind. The hooks look first, take nothing, and retract the request into the "
        "waiting queue, where admission decides anew."
    ),
    loses="the server dies when the host or the device pool is full at the end of a prefill",
    rows=("host-exhausted",),
    origin="sgl-project/sglang#23704",
    remove_when="a full pool at staging raises nothing in the oldest supported release",
    requires=("retract-order",),
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.COORDINATOR}:HiSparseCoordinator.admit_request_into_staging", admit_request_into_staging),
        Hook(f"{upstream.SCHEDULER}:Scheduler.get_next_batch_to_run", get_next_batch_to_run),
    ),
)
