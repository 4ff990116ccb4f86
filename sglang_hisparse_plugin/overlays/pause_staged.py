"""A pause that retracts reaches requests that are still staging."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_parameters, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    pause = existing(upstream.scheduler_method(tree, "pause_generation"), "Scheduler.pause_generation")
    expect_parameters(pause, "self", "recv_req")
    retracts = pause.calls("retract_all")
    expect(len(retracts) == 1, "one call of retract_all in pause_generation", f"{len(retracts)}")
    if "ack_staging_queue" in ast.unparse(pause.node):
        return Fixed("pause_generation looks into the staging queue")
    requeues = pause.calls("_add_request_to_queue")
    expect(len(requeues) == 1, "one call of _add_request_to_queue in pause_generation", f"{len(requeues)}")
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
