"""A PD decode worker has KV sent only to requests that each pool has room for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from .. import memory, upstream
from ..admission import Admission, never
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from . import given_up
from .probing import existing, expect, expect_hookable, probe

QUEUE = "DecodePreallocQueue"


@probe
def judge(tree: SourceTree) -> Verdict:
    if upstream.coordinator_method(tree, "admit_request_direct") is None:
        return Absent("no KV is received to the host pool")
    names = "_update_handshake_waiters", "pop_preallocated", "_pre_alloc"
    ask, pop, take = (existing(tree.function(upstream.DECODE, f"{QUEUE}.{n}"), f"{QUEUE}.{n}") for n in names)
    if pop.calls("self._hold_back_without_room"):
        return Fixed("pop_preallocated asks each pool")
    expect_hookable(ask, "self", "rids_to_check", more=True)
    expect_hookable(pop, "self", "rids_to_check", more=True)
    receive = tree.function(upstream.DECODE, "DecodeTransferQueue.pop_transferred")
    expect_hookable(existing(receive, "DecodeTransferQueue.pop_transferred"), "self", "rids_to_check")
    given_up.expect_told(tree)
    asked = len(pop.calls("self._update_handshake_waiters"))
    expect(asked == 1, "one call of _update_handshake_waiters in pop_preallocated", f"{asked}")
    taken = [*take.calls("mem_pool_host.alloc"), *take.calls("mem_pool_host.alloc_paged_token_slots")]
    expect(len(taken) == 1, "one allocation of host rows in _pre_alloc", f"{len(taken)}")
    return Defective("the host pool is never asked before host rows are taken for a request whose KV is to be sent")


def update_handshake_waiters(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Of those that are ready only as many stay it, in order, as each pool has room for; others are asked again."""
    scheduler = queue.scheduler
    if scheduler.hisparse_coordinator is None:
        return original(queue, *args, **kwargs)
    for entry in queue.queue:
        if given_up.is_given_up(entry):  # or it would not be looked at again, and be given slots first
            entry.waiting_for_input = False
    result = original(queue, *args, **kwargs)
    queue.hisparse_lacking = None
    reserved = int(queue.num_reserved_decode_tokens)
    admission = Admission(scheduler, scheduler.running_batch, _others(scheduler), clip=reserved)
    full = False
    for entry in queue.queue:
        if not entry.waiting_for_input:
            continue
        lacking = [] if full else admission.lacking(entry.req, 1.0)
        if lacking and queue.hisparse_lacking is None:
            queue.hisparse_lacking = entry, lacking
        full = full or bool(lacking)
        if full:
            entry.waiting_for_input = False
        else:
            admission.admit(entry.req)
    return result


def pop_preallocated(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """If nobody is taken and nobody is there who could make room, the first request that is ready is refused."""
    taken, failed = result = original(queue, *args, **kwargs)
    scheduler = queue.scheduler
    if scheduler.hisparse_coordinator is None or taken or failed or not _is_idle(scheduler):
        return result
    ready = [(entry, _too_small(queue, entry.req)) for entry in queue.queue if entry.waiting_for_input]
    small = [(entry, names) for entry, names in ready if names]  # the rest may wait for their LoRA adapters
    for entry, lacking in filter(None, small[:1] if ready else [queue.hisparse_lacking]):
        message = never(scheduler.hisparse_coordinator, entry.req, lacking)
        entry.req.finished_reason = upstream.aborted(message, status_code=upstream.NEVER)  # answered in the next pass
    return result


def _too_small(queue: Any, req: Any) -> list[str]:
    """The pools of which SGLang wants more for a request than is free, though nobody else holds any."""
    c, longest = queue.scheduler.hisparse_coordinator, importlib.import_module(upstream.DECODE).CLIP_MAX_NEW_TOKEN
    ahead = max(int(queue.num_reserved_decode_tokens), min(int(req.sampling_params.max_new_tokens), longest))
    tokens = len(req.origin_input_ids) + len(req.output_ids) + ahead
    lacking = memory.lacking(c, {"logical": tokens, "device": int(c.padded_buffer_size) + upstream.scratch(c, None)})
    asked = getattr(queue, "_allocatable_tokens", None)  # to 0.5.11
    if not lacking and asked is not None and tokens > asked():
        return ["device"]  # to 0.5.10.post1 all tokens must fit there, too
    return lacking


def pop_transferred(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Whose hot buffer finds no room, should there be less than when it was taken, is not asked for yet."""
    c = queue.scheduler.hisparse_coordinator
    if c is None:
        return original(queue, *args, **kwargs)
    room, late = int(upstream.pools(c)["device"].available_size()), []
    for entry in queue.queue:
        if given_up.is_given_up(entry):  # takes none
            continue
        room -= memory.hot_buffer(c, upstream.allocated_len(entry.req))
        if room < 0:
            late.append(entry)
    with upstream.left_out(queue, late):
        return original(queue, *args, **kwargs)


def _others(scheduler: Any) -> Iterator[Any]:
    """Who will take more slots besides those who run: their KV is on its way, or has come."""
    transfers = scheduler.disagg_decode_transfer_queue.queue
    yield from (entry.req for entry in transfers if not given_up.is_given_up(entry))
    yield from scheduler.waiting_queue


def _is_idle(scheduler: Any) -> bool:
    busy = upstream.holders(scheduler) or scheduler.waiting_queue or upstream.transfers(scheduler)
    return not busy and not upstream.pass_in_flight(scheduler)


OVERLAY = Overlay(
    id="prealloc-memory",
    symptom="with PD disaggregation, a request that the host pool has no room for ends the decode worker",
    why=(
        "A decode worker takes host rows for a request before its KV is sent. It asks the logical pool and, from "
        "0.5.11, how many hot buffers there is room for now, but never the host pool, nor what buffers may still grow "
        "to: the allocation raises and ends the worker, before the transfer or after it. A prompt that leaves less "
        "than the tokens SGLang reserves is never taken, even alone. The hooks ask each pool for what everybody may "
        "still need of it, let the others wait, and refuse a request that an idle worker has no room for."
    ),
    loses="with PD disaggregation, a full host or device pool ends the decode worker",
    rows=("host-exhausted", "length-limit"),
    origin="sgl-project/sglang#23704",
    remove_when="pop_preallocated asks each pool in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.DECODE}:{QUEUE}._update_handshake_waiters", update_handshake_waiters),
        Hook(f"{upstream.DECODE}:{QUEUE}.pop_preallocated", pop_preallocated),
        Hook(f"{upstream.DECODE}:DecodeTransferQueue.pop_transferred", pop_transferred),
        given_up.HOOK,
    ),
)
