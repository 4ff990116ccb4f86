"""On a PD decode worker, an aborted request that has not run yet gives its slots back."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, probe, tells

DECODE = "self.disaggregation_mode == DisaggregationMode.DECODE"
LOOP = "for i in reversed(to_del):"


@probe
def judge(tree: SourceTree) -> Verdict:
    abort = existing(upstream.scheduler_method(tree, "abort_request"), "Scheduler.abort_request")
    frees = [call for call in abort.calls("release_kv_cache") if conjuncts(abort.guards(call)) == {DECODE}]
    expect(
        len(frees) == 1 and abort.blocks(frees[0]) == [LOOP] and ast.unparse(frees[0].args[0]) == "req",
        f"one release_kv_cache(req, ...) {LOOP} if {DECODE}",
        "; ".join(ast.unparse(call) for call in frees) or "none",
    )
    if tells(tree, abort, "request_finished", frees[0]):
        return Fixed("abort_request tells the coordinator first")
    expect_hookable(abort, "self", "recv_req")
    return Defective("abort_request frees a waiting request that came with its KV and never tells the coordinator")


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Tell the coordinator of those who wait with their KV, while it can still find their rows."""
    coordinator = scheduler.hisparse_coordinator
    if coordinator is not None and scheduler.disaggregation_mode.name == "DECODE":
        for req in scheduler.waiting_queue:
            if upstream.means(recv_req, req) and upstream.slot(req) is not None:
                coordinator.request_finished(req)
    return original(scheduler, recv_req)


OVERLAY = Overlay(
    id="waiting-abort",
    symptom="with PD disaggregation, aborting a request that waits to decode leaks its hot buffer and host slots",
    why=(
        "On a decode worker a request that waits has its KV in host slots and a hot buffer already. From 0.5.12 to "
        "0.5.21 abort_request releases only its logical slots. The hook tells the coordinator first, as earlier and "
        "later releases do."
    ),
    loses="with PD disaggregation, every abort of a waiting request leaks a hot buffer and host slots",
    rows=("waiting-abort",),
    origin="removed in sgl-project/sglang 0.5.12, back in 0.5.22",
    remove_when="0.5.22 is the oldest supported release",
    fixed_since="0.5.22",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.abort_request", abort_request),),
)
