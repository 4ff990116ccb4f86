"""What happens to requests under HiSparse is counted, and coordinators are known to whoever watches."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..observe import events, metrics, start
from ..patching.outcome import Defective, Verdict
from ..patching.overlay import Around, Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .probing import existing, expect_hookable, expect_plain, probe

COORDINATOR = "HiSparseCoordinator"
METHODS = ("retract_req", "request_finished")


def _functions(tree: SourceTree) -> tuple[FunctionSource, ...]:
    """What is hooked, in the order of the hooks."""
    init = existing(upstream.coordinator_method(tree, "__init__"), f"{COORDINATOR}.__init__")
    methods = [existing(upstream.coordinator_method(tree, name), f"{COORDINATOR}.{name}") for name in METHODS]
    abort = existing(upstream.scheduler_method(tree, "abort_request"), "Scheduler.abort_request")
    refuse = existing(tree.function(upstream.BATCH, "Req.set_finish_with_abort"), "Req.set_finish_with_abort")
    return init, *methods, abort, refuse


@probe
def judge(tree: SourceTree) -> Verdict:
    init, retract, finished, abort, refuse = _functions(tree)
    expect_plain(init)
    for method in (retract, finished):
        expect_hookable(method, "self", "req")
    expect_hookable(abort, "self", "recv_req")
    expect_hookable(refuse, "self", "error_msg", more=True)
    return Defective("SGLang counts nothing that HiSparse does")


def init(original: Any, coordinator: Any, *args: Any, **kwargs: Any) -> None:
    """Let the observer give it counters, before anything is captured."""
    original(coordinator, *args, **kwargs)
    start.attach(coordinator)


def retract_req(original: Any, coordinator: Any, req: Any) -> Any:
    """Count a request that holds a slot."""
    if upstream.slot(req) is not None and not req.finished():
        events.count(metrics.RETRACTIONS, "staging" if req.hisparse_staging else "running")
    return original(coordinator, req)


def request_finished(original: Any, coordinator: Any, req: Any) -> Any:
    """Count a request that ends by an abort."""
    if (slot := upstream.slot(req)) is not None:
        start.forget(slot)
    reason = upstream.abort_reason(req)
    if reason is not None and not getattr(req, REFUSED, False):
        events.count(metrics.ABORTS, reason)
    return original(coordinator, req)


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Count requests that a client's abort takes out of the waiting queue: they never meet the coordinator."""
    if scheduler.hisparse_coordinator is None:
        return original(scheduler, recv_req)
    waiting = len(scheduler.waiting_queue)
    result = original(scheduler, recv_req)
    events.count(metrics.ABORTS, upstream.CLIENT, waiting - len(scheduler.waiting_queue))
    return result


def set_finish_with_abort(original: Any, req: Any, error_msg: str, *args: Any, **kwargs: Any) -> Any:
    """Count a request that is answered with an error before it ran. Its later end is no second one."""
    result = original(req, error_msg, *args, **kwargs)
    if not getattr(req, REFUSED, False):
        setattr(req, REFUSED, True)
        events.count(metrics.REFUSED, upstream.abort_reason(req) or "other")
    return result


REFUSED = "hisparse_refused"  #: attribute of a request that was counted as refused

_SHIMS: tuple[Around, ...] = (init, retract_req, request_finished, abort_request, set_finish_with_abort)

OVERLAY = Overlay(
    id="observe",
    symptom="nobody sees hit rates, retractions or aborts of HiSparse",
    why=(
        "SGLang has no metrics of HiSparse. The hooks count what happens to requests, an addition each, and hand a new "
        "coordinator to the observer, which does nothing unless metrics, a log line or a trace were asked for."
    ),
    loses="there are no metrics of HiSparse, no log line and no trace",
    no_diff="an addition, not a repair",
    rows=(),
    origin="asked for in several issues; vLLM has such metrics, SGLang has none",
    remove_when="SGLang exports the same itself",
    probe=judge,
    hooks=lambda tree: tuple(
        Hook(function.target, shim) for function, shim in zip(_functions(tree), _SHIMS, strict=True)
    ),
)
