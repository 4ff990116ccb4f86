"""How long a request may be is told by the pools that hold all of it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .meanwhile import meanwhile
from .probing import existing, expect, expect_hookable, looks_at, probe

WORKER = "sglang.srt.managers.tp_worker"
METHOD, INIT = "TpModelWorker.get_worker_info", "TpModelWorker.__init__"
#: Places of the longest request, and of its longest prompt, in what the method returns.
LENGTH, INPUT = 4, 5
#: Cuts the number of tokens to generate to what can be scheduled.
CLIP = "init_req_max_new_tokens"
#: Refuses prompts whose KV is to come, by the device pool to 0.5.17.
RECEIVED = "DecodePreallocQueue._check_if_req_exceed_kv_capacity"
#: What has such a prompt wait for room in the device pool, too, to 0.5.10.post1.
ON_DEVICE = "DecodePreallocQueue._allocatable_tokens"
#: The name under which a scheduler and its cut know the size of the device pool.
DEVICE = "max_total_num_tokens"


@probe
def judge(tree: SourceTree) -> Verdict:
    info = existing(tree.function(WORKER, METHOD), METHOD)
    clip = existing(upstream.scheduler_method(tree, CLIP), f"Scheduler.{CLIP}")
    returned = [node.value for node in ast.walk(info.node) if isinstance(node, ast.Return)]
    items = returned[0].elts if len(returned) == 1 and isinstance(returned[0], ast.Tuple) else []
    found = [ast.unparse(item) for item in items[LENGTH : INPUT + 1]]
    expect(
        [item.removeprefix("self.") for item in found]
        in (["max_req_len", "max_req_input_len"], ["max_req_len", "max_req_len - 5"]),
        f"one tuple returned, with max_req_len and max_req_input_len as items {LENGTH} and {INPUT}",
        ", ".join(found) or "another return",
    )
    limits = info if not found[0].startswith("self.") else existing(tree.function(WORKER, INIT), INIT)
    answers = not looks_at(clip, DEVICE) or _knows(clip)
    if _knows(limits) and answers:
        return Fixed("requests and answers are limited to what the logical pool holds")
    expect_hookable(info, "self")
    expect_hookable(clip, "self", "req")
    for check in _refusing(tree):
        expect_hookable(check, "self", "req")
    what = "cuts answers" if _knows(limits) else "limits requests" if answers else "limits requests, and cuts answers,"
    return Defective(f"SGLang {what} to what the device pool holds")


def _knows(function: FunctionSource) -> bool:
    """Whether the size of the logical pool stands in it, for when HiSparse is on."""
    return any(
        any("enable_hisparse" in guard for guard in function.guards(node)) for node in looks_at(function, "size_full")
    )


def _refusing(tree: SourceTree) -> Iterator[FunctionSource]:
    """What refuses a prompt with KV to come that waits for no more of the device pool than its hot buffer."""
    check, room = (tree.function(upstream.DECODE, name) for name in (RECEIVED, ON_DEVICE))
    waits = room and not looks_at(room, "logical_attn_allocator")
    if check and not waits and not looks_at(check, "enable_hisparse"):
        yield check


def get_worker_info(original: Any, worker: Any) -> Any:
    """A prompt that is prefilled here passes through the device pool; one that comes with its KV does not."""
    info = original(worker)
    allocator = worker.model_runner.token_to_kv_pool_allocator
    if not upstream.is_hisparse(allocator):
        return info
    spare = info[LENGTH] - info[INPUT]
    longest = min(worker.model_config.context_len, allocator.size_full) - 1
    prompt = longest - spare
    if upstream.prefills(worker):
        prompt = min(prompt, upstream.device_tokens(allocator))
    return (*info[:LENGTH], longest, prompt, *info[INPUT + 1 :])


def init_req_max_new_tokens(original: Any, scheduler: Any, req: Any) -> Any:
    """From 0.5.12 SGLang reads here how much its prefill adder will ever find free: the logical pool."""
    if scheduler.hisparse_coordinator is None:
        return original(scheduler, req)
    with _logical(scheduler):
        return original(scheduler, req)


def check_if_req_exceed_kv_capacity(original: Any, queue: Any, req: Any) -> Any:
    """Of a prompt that comes with its KV the device pool holds no more than a hot buffer."""
    if queue.scheduler.hisparse_coordinator is None:
        return original(queue, req)
    with _logical(queue):
        return original(queue, req)


def _logical(owner: Any) -> contextlib.AbstractContextManager[None]:
    """Who goes by the size of the device pool sees that of the logical one."""
    return meanwhile(owner, max_total_num_tokens=owner.token_to_kv_pool_allocator.size_full)


OVERLAY = Overlay(
    id="length-limit",
    symptom="answers are cut and prompts refused as if the device pool had to hold them, though host memory does",
    why=(
        "SGLang limits prompt and answer together to the size of the KV pool, by which it means the device pool. Under "
        "HiSparse that holds a prompt only until it is staged, and with PD disaggregation not even that, though to "
        "0.5.17 a decode worker refuses prompts by it, too. The hooks take the logical pool for the limit, and the "
        "device pool only for prompts that are prefilled here. What 0.5.21 calls logical tokens is the device pool of "
        "all ranks that share a context."
    ),
    loses="prompt and answer together may not be longer than the device pool",
    rows=("length-limit",),
    origin="sgl-project/sglang#24764, #28753",
    remove_when="get_worker_info limits requests by the allocator's size_full in the oldest supported release",
    requires=("admission-memory",),
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{WORKER}:{METHOD}", get_worker_info),
        Hook(f"{upstream.SCHEDULER}:Scheduler.{CLIP}", init_req_max_new_tokens),
        *(Hook(check.target, check_if_req_exceed_kv_capacity) for check in _refusing(tree)),
    ),
)
