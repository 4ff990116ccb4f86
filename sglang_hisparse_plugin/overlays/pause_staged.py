"""A pause that retracts reaches requests that are still staging."""

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

#: What a pause that retracts asks before it does.
STAGED = {"recv_req.mode != 'in_place'", "recv_req.mode == 'retract'", "self.enable_hisparse"}
RETRACTS = {
    *("recv_req.mode != 'in_place'", "recv_req.mode == 'retract'", "retract_reqs"),
    *("not self.running_batch.is_empty()", "len(self.running_batch.reqs) != 0"),
}


@probe
def judge(tree: SourceTree) -> Verdict:
    pause = existing(upstream.scheduler_method(tree, "pause_generation"), "Scheduler.pause_generation")
    retracts = pause.calls("retract_all")
    expect(len(retracts) == 1, "one call of retract_all in pause_generation", f"{len(retracts)}")
    guards = conjuncts(pause.guards(retracts[0]))
    expect(guards <= RETRACTS, "retract_all if there is anything to retract", "; ".join(sorted(guards - RETRACTS)))
    if looks_at(pause, "ack_staging_queue"):
        found = [node for node in ast.walk(pause.node) if takes_staged(node) and node.lineno < retracts[0].lineno]
        expect(
            len(found) == 1 and conjuncts(pause.guards(found[0])) <= STAGED and not pause.blocks(found[0]),
            "the requests of the staging queue taken before retract_all, whenever HiSparse is on",
            "another use of ack_staging_queue",
        )
        return Fixed("pause_generation looks into the staging queue")
    expect_no_callee_looks_at(tree, pause, "ack_staging_queue", "into the staging queue")
    requeues = pause.calls("_add_request_to_queue")
    expect(len(requeues) == 1, "one call of _add_request_to_queue in pause_generation", f"{len(requeues)}")
    expect_hookable(pause, "self", "recv_req")
    return Defective("pause_generation retracts what is in a batch; requests in the staging queue are in none")


def pause_generation(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Let the batches that are about to be retracted know the coordinator, then retract who is left in its queue."""
    coordinator = scheduler.hisparse_coordinator
    if coordinator is None or recv_req.mode != "retract":
        return original(scheduler, recv_req)
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None:
            batch.hisparse_coordinator = coordinator
    result = original(scheduler, recv_req)
    if coordinator.ack_staging_queue:
        upstream.retract(scheduler, [act.req for act in coordinator.ack_staging_queue])
    return result


OVERLAY = Overlay(
    id="pause-staged",
    symptom="a request that is staging when the engine is paused runs on with old weights, or leaks its host slots",
    why=(
        "Between prefill and decode a request waits in the coordinator's staging queue. If it is still in the last "
        "prefill batch, the pause retracts it, to 0.5.15 through a batch that does not know the coordinator: it leaks "
        "and later enters decode without a slot. If not, it is in no batch and the pause misses it: the cache cannot "
        "be flushed while paused. The hook lends the batches the coordinator and retracts the rest of its queue."
    ),
    loses="pausing with retract misses requests that are staging, or leaks their slots",
    rows=("other-releasers",),
    origin="not reported upstream",
    remove_when="pause_generation retracts the requests of the staging queue in the oldest supported release",
    requires=("retract-order",),
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.pause_generation", pause_generation),),
)
