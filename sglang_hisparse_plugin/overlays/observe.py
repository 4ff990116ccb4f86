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
SCHEDULER_METHODS = ("abort_request", "_abort_on_queued_limit", "process_batch_result")


def _functions(tree: SourceTree) -> tuple[FunctionSource, ...]:
    """What is hooked, in the order of the hooks."""
    init = existing(upstream.coordinator_method(tree, "__init__"), f"{COORDINATOR}.__init__")
    methods = [existing(upstream.coordinator_method(tree, name), f"{COORDINATOR}.{name}") for name in METHODS]
    scheduler = [existing(upstream.scheduler_method(tree, name), f"Scheduler.{name}") for name in SCHEDULER_METHODS]
    refuse = existing(tree.function(upstream.BATCH, "Req.set_finish_with_abort"), "Req.set_finish_with_abort")
    return init, *methods, *scheduler, refuse


@probe
def judge(tree: SourceTree) -> Verdict:
    init, retract, finished, abort, queue, result, refuse = _functions(tree)
    expect_plain(init)
    for method in (retract, finished):
        expect_hookable(method, "self", "req")
    for method in (abort, queue):
        expect_hookable(method, "self", "recv_req")
    expect_hookable(result, "self", "batch", "result")
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
    _count_abort(req)
    return original(coordinator, req)


def abort_request(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Count requests that a client's abort takes out of the waiting and staging queues: they never meet
    `request_finished`. `staging-abort` retracts them first, which is no retraction to whoever looks from outside.
    """
    coordinator = scheduler.hisparse_coordinator
    if coordinator is None:
        return original(scheduler, recv_req)
    before = len(scheduler.waiting_queue) + len(coordinator.ack_staging_queue)
    with events.left_out(metrics.RETRACTIONS):
        result = original(scheduler, recv_req)
    after = len(scheduler.waiting_queue) + len(coordinator.ack_staging_queue)
    events.count(metrics.ABORTS, upstream.CLIENT, before - after)
    return result


def abort_on_queued_limit(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Count a request that a full queue turns away: the new one, or one that waits and matters less."""
    waiting = len(scheduler.waiting_queue)
    turned_away = original(scheduler, recv_req)
    if scheduler.hisparse_coordinator is not None and not (turned_away and getattr(recv_req, events.COUNTED, False)):
        events.count(metrics.REFUSED, metrics.QUEUE_FULL, int(turned_away) or waiting - len(scheduler.waiting_queue))
    return turned_away


def process_batch_result(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    """Count requests that were aborted while their prompt was computed: to 0.5.21 no coordinator is told of them."""
    done = original(scheduler, batch, result)
    if scheduler.hisparse_coordinator is not None and batch.forward_mode.is_extend():
        for req in batch.reqs:
            if req.finished():
                _count_abort(req)
    return done


def _count_abort(req: Any) -> None:
    """Count a request that was aborted, unless it was counted before, as that or as refused."""
    reason = upstream.abort_reason(req)
    if reason is not None:
        events.count_once(metrics.ABORTS, req, reason)


def set_finish_with_abort(original: Any, req: Any, error_msg: str, *args: Any, **kwargs: Any) -> Any:
    """Count a request that is answered with an error before it ran. Its later end is no second one."""
    result = original(req, error_msg, *args, **kwargs)
    events.count_once(metrics.REFUSED, req, upstream.abort_reason(req) or "other")
    return result


_SHIMS: tuple[Around, ...] = (
    init,
    retract_req,
    request_finished,
    abort_request,
    abort_on_queued_limit,
    process_batch_result,
    set_finish_with_abort,
)

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
