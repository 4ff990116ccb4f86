"""On a PD decode worker, nothing is freed that a prefill worker may still write to."""

from __future__ import annotations

import ast
import time
from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

QUEUE = "DecodeTransferQueue"
SWITCH = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
#: Seconds after which a transfer that nobody hears of any more is taken to be over; SGLang, from 0.5.21, waits as long.
PATIENCE = 30.0


@probe
def judge(tree: SourceTree) -> Verdict:
    if upstream.coordinator_method(tree, "admit_request_direct") is None:
        return Absent("no KV is received to the host pool")
    pop = existing(tree.function(upstream.DECODE, f"{QUEUE}.pop_transferred"), f"{QUEUE}.pop_transferred")
    if tree.function(upstream.DECODE, f"{QUEUE}._defer_release"):
        switches = [node for node in ast.walk(tree.module("sglang.srt.environ") or ast.Module([], [])) if _sets(node)]
        expect(len(switches) == 1, f"one {SWITCH} = EnvBool(...)", f"{len(switches)}")
        if ast.unparse(switches[0].value) == "EnvBool(True)":  # type: ignore[attr-defined]
            return Fixed("SGLang itself frees nothing before the prefill worker says that it is done")
    expect_hookable(pop, "self", "rids_to_check")
    expect(bool(pop.calls("release_kv_cache") or pop.calls("_release_request")), "a release in pop_transferred", "none")
    return Defective("a request that is aborted gives its host rows up while its prefill worker writes to them")


def _sets(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == SWITCH


def pop_transferred(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave those out that were aborted, with everything they hold, until their transfers are over on every rank."""
    if queue.scheduler.hisparse_coordinator is None or getattr(queue, "enable_deferred_kv_release", False):
        return original(queue, *args, **kwargs)
    aborted = [entry for entry in queue.queue if upstream.is_aborted(entry)]
    over = _on_every_rank(queue, [_is_over(entry) for entry in aborted])
    waiting = [entry for entry, done in zip(aborted, over, strict=True) if not done]
    with upstream.left_out(queue, waiting):
        return original(queue, *args, **kwargs)


def _is_over(entry: Any) -> bool:
    """The prefill worker has said that it has sent everything, or will hardly send any more."""
    now = time.monotonic()
    entry.hisparse_deadline = getattr(entry, "hisparse_deadline", now + PATIENCE)
    known = getattr(entry.kv_receiver.kv_mgr, "request_status", {})
    return now >= entry.hisparse_deadline or known.get(entry.req.bootstrap_room) == upstream.poll_state("Success")


def _on_every_rank(queue: Any, flags: list[bool]) -> list[bool]:
    """All ranks hear of an abort in the same iteration, so they ask about the same requests."""
    import torch

    group = queue.gloo_group
    if not flags or torch.distributed.get_world_size(group) == 1:
        return flags
    agreed = torch.tensor(flags, dtype=torch.uint8)
    torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN, group=group)
    return [bool(flag) for flag in agreed.tolist()]


OVERLAY = Overlay(
    id="late-transfer",
    symptom="with PD disaggregation, KV of an aborted request lands in host rows that others hold by then",
    why=(
        "When a client gives up while its KV is on its way, the decode worker frees the host rows at once, but the "
        "prefill worker goes on writing to them. The next request gets the rows, and the KV of somebody else. SGLang "
        "waits for the prefill worker from 0.5.21 (from 0.5.19 if told to). The hook leaves such a request in the "
        "transfer queue, with all it holds, until the transfer is reported complete or 30 seconds have passed; only "
        "then its abort is answered."
    ),
    loses="with PD disaggregation, aborts during a transfer can corrupt the KV of other requests",
    rows=("waiting-abort",),
    origin="sgl-project/sglang, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE of 0.5.19",
    fixed_since="0.5.21",
    remove_when="the oldest supported release waits for the prefill worker",
    no_diff="SGLang's own, with acknowledgements by the prefill worker, is in 0.5.19 and on by default from 0.5.21",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.DECODE}:{QUEUE}.pop_transferred", pop_transferred),),
)
