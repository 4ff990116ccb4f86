"""A decode step for which a pool has no room retracts the youngest request; one that has room retracts nobody."""

from __future__ import annotations

from typing import Any

from .. import memory, upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from . import retry_later
from .probing import existing, expect, expect_hookable, expect_no_callee_looks_at, looks_at, probe

#: How SGLang's abort of a request that is alone begins.
ALONE = "Out of memory even after retracting all other requests"


@probe
def judge(tree: SourceTree) -> Verdict:
    check = existing(tree.function(upstream.BATCH, "ScheduleBatch.check_decode_mem"), "ScheduleBatch.check_decode_mem")
    retract = existing(tree.function(upstream.BATCH, "ScheduleBatch.retract_decode"), "ScheduleBatch.retract_decode")
    update = existing(upstream.scheduler_method(tree, "update_running_batch"), "Scheduler.update_running_batch")
    if looks_at(check, "hisparse_coordinator"):
        calls = check.calls("hisparse_coordinator.pools_without_room")
        expect(len(calls) == 1, "one call of hisparse_coordinator.pools_without_room", "another use of the coordinator")
        return Fixed("check_decode_mem asks the coordinator")
    expect_no_callee_looks_at(tree, check, "hisparse_coordinator", "at the coordinator")
    for name in ("_grow_device_buffers", "_eager_backup_previous_token"):
        existing(upstream.coordinator_method(tree, name), f"HiSparseCoordinator.{name}")
    expect_hookable(check, "self", "selected_indices")
    expect_hookable(retract, "self", more=True)
    expect_hookable(update, "self", "batch")
    return Defective("check_decode_mem takes the smaller of two pools for what a step needs, and overlooks the third")


def check_decode_mem(original: Any, batch: Any, selected_indices: Any = None) -> bool:
    """Whether each pool has what the step takes of it; the original has evicted what could be."""
    fits = bool(original(batch, selected_indices))
    c = batch.hisparse_coordinator
    if c is None:
        return fits
    reqs = batch.reqs if selected_indices is None else [batch.reqs[i] for i in selected_indices]
    needed = memory.step(c, reqs, upstream.tokens_ahead(batch))
    if not fits:
        needed["logical"] = batch.new_tokens_required_next_decode(selected_indices)
    batch.hisparse_lacks = memory.lacking(c, needed)
    return not batch.hisparse_lacks


def update_running_batch(original: Any, scheduler: Any, batch: Any) -> Any:
    """Requests in staging, or that came with their KV, are younger than those that decode: they are retracted first."""
    c = scheduler.hisparse_coordinator
    if c is not None and batch.hisparse_coordinator is not None:
        going_on = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        younger = [*(act.req for act in c.ack_staging_queue), *upstream.transferred(scheduler)]
        for req in reversed(younger):
            # SGLang waits for those whose last token is on its way, and for what they give back
            if upstream.finishing(scheduler, batch) or batch.check_decode_mem(going_on):
                break
            for lost in upstream.retract(scheduler, [req]):
                retry_later.answer(scheduler, lost)
        mine = set(map(id, batch.reqs))
        others = any(id(req) not in mine for req in upstream.holders(scheduler))
        batch.hisparse_others = others or upstream.transfers(scheduler)
    return original(scheduler, batch)


def retract_decode(original: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The last request is aborted only if nobody else holds memory; the error says which pool was too small."""
    retracted, ratio, aborted = original(batch, *args, **kwargs)
    c = batch.hisparse_coordinator
    alone = [req for req in aborted if req.to_finish.message.startswith(ALONE)] if c is not None else []
    for req in alone:
        if getattr(batch, "hisparse_others", False) and not upstream.resumable(batch, req):
            req.to_finish = retry_later.reason()
        elif getattr(batch, "hisparse_others", False):
            req.to_finish = None
            aborted.remove(req)
            retracted.append(req)
        elif batch.hisparse_lacks:
            req.to_finish.message += f" {memory.too_small(c, batch.hisparse_lacks)}"
    return retracted, ratio, aborted


OVERLAY = Overlay(
    id="decode-memory",
    symptom="the server dies when the host or device pool runs out in decode, or requests are retracted for nothing",
    why=(
        "A decode step takes logical slots, a host slot for the copy of the token before it, and device slots while a "
        "hot buffer grows. check_decode_mem compares the smaller of the logical and the device pool with the logical "
        "slots: it retracts though a full buffer needs nothing, and what is taken of the host and the device pool is "
        "found out by an exception that ends the scheduler. The hooks ask each pool for what the step takes of it, "
        "retract requests that do not decode yet before those that do, and name the pool when a request is aborted."
    ),
    loses="the server dies as soon as the host pool is full, and retracts requests while the device pool is",
    rows=("host-exhausted", "spurious-retract"),
    origin="sgl-project/sglang#23704",
    remove_when="check_decode_mem asks for host and device slots in the oldest supported release",
    requires=("retract-order", "retract-once"),
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.BATCH}:ScheduleBatch.check_decode_mem", check_decode_mem),
        Hook(f"{upstream.BATCH}:ScheduleBatch.retract_decode", retract_decode),
        Hook(f"{upstream.SCHEDULER}:Scheduler.update_running_batch", update_running_batch),
    ),
)
