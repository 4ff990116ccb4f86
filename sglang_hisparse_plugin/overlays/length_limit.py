"""How long a request may be is told by the pools that hold all of it."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

WORKER = "sglang.srt.managers.tp_worker"
METHOD = "TpModelWorker.get_worker_info"
#: Places of the longest request, and of its longest prompt, in what the method returns.
LENGTH, INPUT = 4, 5
#: Cuts the number of tokens to generate to what can be scheduled.
CLIP = "init_req_max_new_tokens"


@probe
def judge(tree: SourceTree) -> Verdict:
    info = existing(tree.function(WORKER, METHOD), METHOD)
    if "logical_max_total_num_tokens" in ast.unparse(info.node):
        return Fixed("get_worker_info looks at the logical pool")
    returned = [node.value for node in ast.walk(info.node) if isinstance(node, ast.Return)]
    items = returned[0].elts if len(returned) == 1 and isinstance(returned[0], ast.Tuple) else []
    found = [ast.unparse(item).removeprefix("self.") for item in items[LENGTH : INPUT + 1]]
    expect(
        found in (["max_req_len", "max_req_input_len"], ["max_req_len", "max_req_len - 5"]),
        f"one tuple returned, with max_req_len and max_req_input_len as items {LENGTH} and {INPUT}",
        ", ".join(found) or "another return",
    )
    expect_hookable(info, "self")
    expect_hookable(existing(upstream.scheduler_method(tree, CLIP), f"Scheduler.{CLIP}"), "self", "req")
    return Defective("get_worker_info limits requests to what the device pool holds")


def get_worker_info(original: Any, worker: Any) -> Any:
    """A prompt that is prefilled here passes through the device pool; one that comes with its KV does not."""
    info = original(worker)
    allocator = worker.model_runner.token_to_kv_pool_allocator
    if not hasattr(allocator, "hisparse_attn_allocator"):
        return info
    spare = info[LENGTH] - info[INPUT]
    longest = min(worker.model_config.context_len, allocator.logical_attn_allocator.size) - 1
    prompt = longest - spare
    if upstream.prefills(worker):
        prompt = min(prompt, allocator.hisparse_attn_allocator.size)
    return (*info[:LENGTH], longest, prompt, *info[INPUT + 1 :])


def init_req_max_new_tokens(original: Any, scheduler: Any, req: Any) -> Any:
    """From 0.5.12 SGLang reads here how much its prefill adder will ever find free: the logical pool."""
    if scheduler.hisparse_coordinator is None:
        return original(scheduler, req)
    device_tokens = scheduler.max_total_num_tokens
    scheduler.max_total_num_tokens = upstream.pools(scheduler.hisparse_coordinator)["logical"].size
    try:
        return original(scheduler, req)
    finally:
        scheduler.max_total_num_tokens = device_tokens


OVERLAY = Overlay(
    id="length-limit",
    symptom="answers are cut and prompts refused as if the device pool had to hold them, though host memory does",
    why=(
        "SGLang limits prompt and answer together to the size of the KV pool, by which it means the device pool. Under "
        "HiSparse that holds a prompt only until it is staged, and with PD disaggregation not even that. The hooks "
        "take the logical pool for the limit, and the device pool only for prompts that are prefilled here."
    ),
    loses="prompt and answer together may not be longer than the device pool",
    rows=("length-limit",),
    origin="sgl-project/sglang#24764, #28753",
    remove_when="0.5.21 is the oldest supported release",
    fixed_since="0.5.21",
    requires=("admission-memory",),
    no_diff="0.5.21 has it",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{WORKER}:{METHOD}", get_worker_info),
        Hook(f"{upstream.SCHEDULER}:Scheduler.{CLIP}", init_req_max_new_tokens),
    ),
)
