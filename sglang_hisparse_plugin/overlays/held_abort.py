"""On a PD decode worker, an abort reaches requests that a pause has taken back and that wait for it to end."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect_hookable, expect_no_callee_looks_at, looks_at, probe

HELD = "held_rebootstrap_reqs"


@probe
def judge(tree: SourceTree) -> Verdict:
    if tree.function(upstream.DECODE, "DecodePreallocQueue.hold_rebootstrap") is None:
        return Absent("a pause has no KV computed again")
    abort = existing(upstream.scheduler_method(tree, "abort_request"), "Scheduler.abort_request")
    if looks_at(abort, HELD):
        return Fixed(f"abort_request looks at {HELD}")
    expect_no_callee_looks_at(tree, abort, HELD, f"at {HELD}")
    expect_hookable(abort, "self", "recv_req")
    return Defective(f"abort_request looks at queues and batches; requests in {HELD} are in none")


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Answer those whom the abort means among the held, and drop them; they hold nothing."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    if scheduler.hisparse_coordinator is not None and queue is not None:
        held = getattr(queue, HELD)
        meant = [req for req in held if upstream.means(recv_req, req)]
        setattr(queue, HELD, [req for req in held if not any(req is other for other in meant)])
        for req in meant:
            req.finished_reason = upstream.aborted()
            upstream.answer_abort(scheduler, req, req.finished_reason.to_json())
    return original(scheduler, recv_req)


OVERLAY = Overlay(
    id="held-abort",
    symptom="with PD disaggregation, a client that disconnects during a pause is not heard, and its request goes on",
    why=(
        "A pause that retracts keeps the requests of a decode worker in a list until the pause ends, and has their KV "
        "computed again then. abort_request looks at queues and batches, so an abort in between is lost: the prompt is "
        "computed again, and the answer generated to its end, for nobody. The hook answers and drops them."
    ),
    loses="aborts during a pause that retracts have no effect on a PD decode worker",
    rows=("staging-abort",),
    origin="not reported upstream",
    remove_when="abort_request looks at the requests held for a pause in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.abort_request", abort_request),),
)
