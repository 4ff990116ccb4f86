"""An abort reaches requests that are staging."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import (
    conjuncts,
    existing,
    expect,
    expect_hookable,
    expect_no_callee_looks_at,
    looks_at,
    probe,
    takes_staged,
)

#: How an abort finds the requests it means.
MEANT = "recv_req.abort_all or req.rid.startswith(recv_req.rid)"


@probe
def judge(tree: SourceTree) -> Verdict:
    abort = existing(upstream.scheduler_method(tree, "abort_request"), "Scheduler.abort_request")
    pops = [call for call in abort.calls("self.waiting_queue.pop") if not abort.guards(call)]
    expect(len(pops) == 1, "one unconditional loop that takes aborted requests from the waiting queue", f"{len(pops)}")
    if looks_at(abort, "ack_staging_queue"):
        found = [n for n in ast.walk(abort.node) if takes_staged(n) and n.lineno < pops[0].lineno]
        expect(
            len(found) == 1 and conjuncts(abort.guards(found[0])) == {"self.enable_hisparse"},
            "the requests of the staging queue taken before those of the waiting queue, whenever HiSparse is on",
            "another use of ack_staging_queue",
        )
        return Fixed("abort_request looks into the staging queue")
    expect_no_callee_looks_at(tree, abort, "ack_staging_queue", "into the staging queue")
    meant = [conjuncts(abort.guards(call)) for call in abort.calls("to_del.append")]
    expect(meant == [{MEANT}], f"waiting requests aborted if {MEANT}", "; ".join(" and ".join(test) for test in meant))
    expect_hookable(abort, "self", "recv_req")
    return Defective("abort_request looks at queues and batches; requests in the staging queue are in none")


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Retract whom the abort means, which waits for the transfer; a waiting request is aborted and answered below."""
    coordinator = scheduler.hisparse_coordinator
    if coordinator is not None:
        everybody = [act.req for act in coordinator.ack_staging_queue]
        meant = [req for req in everybody if recv_req.abort_all or req.rid.startswith(recv_req.rid)]
        if meant:
            upstream.release(scheduler, meant)
            for req in meant:  # its prefill batch may still be around, and leaves finished requests out
                req.finished_reason = upstream.aborted()
            scheduler.waiting_queue += meant
    return original(scheduler, recv_req)


OVERLAY = Overlay(
    id="staging-abort",
    symptom="a client that disconnects while its prompt is staging is not heard, and its request decodes to the end",
    why=(
        "Between prefill and decode a request waits in the coordinator's staging queue. abort_request looks at the "
        "waiting queue and at batches, so it is lost, and the request decodes for nobody; if the prefill batch is "
        "still around it decodes once more. The hook retracts it, which waits for the transfer, into the waiting "
        "queue, from where SGLang aborts it."
    ),
    loses="aborting a request that is staging has no effect, and it decodes to its end",
    rows=("staging-abort",),
    origin="not reported upstream; a todo in abort_request",
    remove_when="abort_request looks into the staging queue in the oldest supported release",
    requires=("retract-order",),
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.abort_request", abort_request),),
)
