"""A prompt is admitted if each pool has room for it; one that can never fit is refused with an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import upstream
from ..admission import Admission, never
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

ADD = "PrefillAdder.add_one_req"


@probe
def judge(tree: SourceTree) -> Verdict:
    add = existing(tree.function(upstream.POLICY, ADD), ADD)
    prefill = existing(upstream.scheduler_method(tree, "get_new_batch_prefill"), "Scheduler.get_new_batch_prefill")
    if add.calls("admission.has_room"):
        return Fixed("add_one_req asks each pool")
    expect_hookable(add, "self", "req", more=True)
    expect_hookable(prefill, "self", more=True)
    expect(not tree.mentions(upstream.POLICY, "mem_pool_host"), "no look at the host pool in the prefill policy", "one")
    return Defective("the host pool is never asked, and the smaller of the other two must hold all tokens to come")


def get_new_batch_prefill(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """If the pass admits nobody and nobody is there who could make room, the request it ended at is refused."""
    c = scheduler.hisparse_coordinator
    if c is None:
        return original(scheduler, *args, **kwargs)
    running = kwargs.get("running_batch", args[0] if args else scheduler.running_batch)
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.hisparse_admission = admission = Admission(scheduler, running)
    try:
        result = original(scheduler, *args, **kwargs)
    finally:
        del allocator.hisparse_admission
    idle = not admission.holders and not upstream.pass_in_flight(scheduler)
    if idle and not admission.admitted and admission.refused:
        req, lacking = admission.refused
        upstream.refuse(scheduler, req, never(c, req, lacking))
    return result


def add_one_req(original: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask all pools; the original then asks the logical pool alone, for the tokens to come take nothing of others."""
    allocator = adder.token_to_kv_pool_allocator
    admission = getattr(allocator, "hisparse_admission", None)
    if admission is None:
        return original(adder, req, *args, **kwargs)
    no_room = upstream.no_room()
    lacking = admission.lacking(req, adder.new_token_ratio)
    if lacking:
        admission.refused = req, lacking
        return no_room
    with _logical(upstream.budget_of(adder), allocator):
        result = original(adder, req, *args, **kwargs)
    if req in adder.can_run_list:
        admission.admit(req)
    elif result == no_room:
        admission.refused = req, ["logical"]
    return result


@contextlib.contextmanager
def _logical(budget: Any, whole: Any) -> Iterator[None]:
    """The original looks at the logical pool, and adds no device slots of a buffer or scratch to its tokens."""
    name = "allocator" if hasattr(budget, "allocator") else "token_to_kv_pool_allocator"
    setattr(budget, name, whole.logical_attn_allocator)
    whole.request_slot_reserve = _nothing
    try:
        yield
    finally:
        setattr(budget, name, whole)
        del whole.request_slot_reserve


def _nothing(**_: Any) -> int:
    return 0


OVERLAY = Overlay(
    id="admission-memory",
    symptom="prompts are admitted that the host pool cannot hold, and the server dies; others wait for ever",
    why=(
        "SGLang admits a prompt if the smaller of the logical and the device pool has room for it and for all tokens "
        "to come, of those that decode. It never asks the host pool, overlooks requests in staging, and counts tokens "
        "to come against a device pool that does not take them: a request whose answer is longer than what the prompt "
        "leaves of it is never scheduled, even alone. The hooks ask each pool for what everybody may still need of "
        "it, and refuse a request for which an idle server has no room."
    ),
    loses="more prompts are admitted than the host pool can hold, and long answers to long prompts wait for ever",
    rows=("host-exhausted", "length-limit"),
    origin="sgl-project/sglang#23704",
    remove_when="the prefill adder asks the host pool in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.SCHEDULER}:Scheduler.get_new_batch_prefill", get_new_batch_prefill),
        Hook(f"{upstream.POLICY}:{ADD}", add_one_req),
    ),
)
