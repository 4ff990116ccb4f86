"""A retraction on a PD decode worker does not end it."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from . import retry_later
from .probing import conjuncts, existing, expect, expect_hookable, probe

COPIES = ("offload_kv_cache", "retraction_backup", "backup_kv_cache")
REBOOTSTRAP, BACKUP = "dsv4_needs_rebootstrap", "backup_kv_cache"
ON_DECODE = ("server_args.disaggregation_mode == 'decode'", "get_disagg().disaggregation_mode == 'decode'")
WITHOUT = {"hisparse_coordinator is None", "self.hisparse_coordinator is None"}


@probe
def judge(tree: SourceTree) -> Verdict:
    release = existing(upstream.release_req(tree), "release_req")
    copies = [call for name in COPIES for call in release.calls(name)]
    expect(len(copies) == 1, f"one call of {' or '.join(COPIES)} in {release.qualname}", f"{len(copies)}")
    guards = conjuncts(release.guards(copies[0]))
    if guards & WITHOUT:
        return Fixed("release_req copies no KV with HiSparse")
    expect(
        guards - {"offload_kv"} in [{test} for test in ON_DECODE],
        f"a copy of the KV if {ON_DECODE[0]}",
        " and ".join(sorted(guards)),
    )
    decision = _decision(tree)
    if decision is None:
        offload = existing(tree.function(upstream.BATCH, "Req.offload_kv_cache"), "Req.offload_kv_cache")
        expect_hookable(offload, "self", "req_to_token_pool", "token_to_kv_pool_allocator")
        queue = existing(upstream.scheduler_method(tree, "_add_request_to_queue"), "Scheduler._add_request_to_queue")
        expect_hookable(queue, "self", "req", "is_retracted")
        return Defective("release_req copies the KV of a pool that cannot be copied, after the coordinator gave it up")
    pools = [call.args[1] for call in decision.calls("isinstance") if len(call.args) == 2]
    expect(len(pools) == 1, f"one isinstance in {REBOOTSTRAP}", f"{len(pools)}")
    names = {node.id for node in ast.walk(pools[0]) if isinstance(node, ast.Name)}
    if "HiSparseDSATokenToKVPool" in names:
        return Fixed(f"{REBOOTSTRAP} has the prefill compute a HiSparse pool's KV again")
    expect(names == {"DeepSeekV4TokenToKVPool"}, "isinstance(pool, DeepSeekV4TokenToKVPool)", ", ".join(sorted(names)))
    expect_hookable(decision, "token_to_kv_pool_allocator")
    backup = existing(tree.function(upstream.CACHE, BACKUP), BACKUP)
    expect_hookable(backup, "req", "tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "backend")
    return Defective(f"{REBOOTSTRAP} leaves HiSparse's pool out, which cannot be copied")


def _decision(tree: SourceTree) -> FunctionSource | None:
    """Who says that a retracted request's KV is to be computed again by its prefill worker; from 0.5.22."""
    return tree.function(upstream.CACHE, REBOOTSTRAP)


def needs_rebootstrap(original: Any, token_to_kv_pool_allocator: Any) -> Any:
    """Treat HiSparse's pool as SGLang treats that of DeepSeek-V4."""
    return upstream.is_hisparse(token_to_kv_pool_allocator) or original(token_to_kv_pool_allocator)


def backup_kv_cache(original: Any, req: Any, *args: Any) -> Any:
    """Give KV up that took an adapter, of which the prefill worker would not be told; SGLang answers 503."""
    _, _, allocator, _ = args
    if upstream.is_hisparse(allocator) and req.lora_id is not None:
        return False
    return original(req, *args)


def offload_kv_cache(original: Any, req: Any, req_to_token_pool: Any, token_to_kv_pool_allocator: Any) -> Any:
    """Copy nothing."""
    if upstream.is_hisparse(token_to_kv_pool_allocator):
        return None
    return original(req, req_to_token_pool, token_to_kv_pool_allocator)


def add_request_to_queue(original: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
    """Answer a retracted request that there is no KV for, instead of queueing it."""
    coordinator, mode = scheduler.hisparse_coordinator, scheduler.disaggregation_mode.name
    if coordinator is None or mode != "DECODE" or not req.is_retracted:
        return original(scheduler, req, is_retracted)
    retry_later.answer(scheduler, req)
    return None


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    if _decision(tree):
        return (
            Hook(f"{upstream.CACHE}:{REBOOTSTRAP}", needs_rebootstrap),
            Hook(f"{upstream.CACHE}:{BACKUP}", backup_kv_cache),
        )
    return (
        Hook(f"{upstream.BATCH}:Req.offload_kv_cache", offload_kv_cache),
        Hook(f"{upstream.SCHEDULER}:Scheduler._add_request_to_queue", add_request_to_queue),
    )


OVERLAY = Overlay(
    id="pd-retract",
    symptom="with PD disaggregation, the first retraction on the decode worker ends it",
    why=(
        "A decode worker copies the KV of a retracted request to resume from. HiSparse's pool has no such copy and "
        "raises NotImplementedError, after the coordinator has given the request's slots up. From 0.5.22 SGLang can "
        "have a prefill worker compute the KV again, as it does for DeepSeek-V4; the hook says the same of HiSparse. "
        "A prefill worker is not told of a request's LoRA adapter: such a request is answered with 503. "
        "Before that the hooks copy nothing and answer the request with 503. A pause that retracts computes the KV "
        "again from 0.5.16 by itself."
    ),
    loses="with PD disaggregation, running out of memory on the decode worker ends it",
    rows=("pd-retract",),
    origin="sgl-project/sglang#40729, open",
    remove_when="release_req copies no KV with HiSparse, or has it computed again, in the oldest supported release",
    requires=("retract-order",),
    probe=judge,
    hooks=hooks,
)
