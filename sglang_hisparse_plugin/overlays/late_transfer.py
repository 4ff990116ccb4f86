"""On a PD decode worker, nothing is freed that a prefill worker may still write to."""

from __future__ import annotations

import ast
import logging
import math
import time
from typing import Any

from .. import config, upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from . import given_up
from .meanwhile import meanwhile
from .probing import existing, expect, expect_hookable, probe

QUEUE = "DecodeTransferQueue"
SWITCH = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
#: Seconds after which a transfer that nobody hears of any more is taken to be over, unless `config` says another
#: number; SGLang, from 0.5.21, waits as long. After half of them a prefill worker that does not know is told.
PATIENCE = 30.0
UNHEARD = (
    "HiSparse: request %s was aborted during its transfer %.0f s ago, and its prefill server has not said that it is "
    "done. The %d host rows are given to others now. Should the prefill server still be sending what it had begun to, "
    "that corrupts the KV of others: if it can take so long, set %s to more seconds"
)
logger = logging.getLogger(__name__)


@probe
def judge(tree: SourceTree) -> Verdict:
    if upstream.coordinator_method(tree, "admit_request_direct") is None:
        return Absent("no KV is received to the host pool")
    pop = existing(tree.function(upstream.DECODE, f"{QUEUE}.pop_transferred"), f"{QUEUE}.pop_transferred")
    told = pop.calls("hisparse_coordinator.request_finished")
    if not told and tree.function(upstream.DECODE, f"{QUEUE}._defer_release"):
        release = existing(tree.function(upstream.DECODE, f"{QUEUE}._release_request"), f"{QUEUE}._release_request")
        expect(bool(release.calls("hisparse_coordinator.request_finished")), "_release_request tells it", "nobody does")
        switches = [node for node in ast.walk(tree.module("sglang.srt.environ") or ast.Module([], [])) if _sets(node)]
        values = [ast.unparse(node.value) for node in switches if isinstance(node, ast.Assign)]
        expect(values == ["EnvBool(True)"], f"{SWITCH} = EnvBool(True)", "; ".join(values) or "none")
        return Fixed("SGLang itself frees nothing before the prefill worker says that it is done")
    expect(bool(told), "the coordinator told in pop_transferred", "nobody does")
    expect_hookable(pop, "self", "rids_to_check")
    given_up.expect_told(tree)
    return Defective("a request that is aborted gives its host rows up while its prefill worker writes to them")


def _sets(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == SWITCH


def pop_transferred(original: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave those out that were aborted, with everything they hold, until their transfers are over on every rank."""
    if queue.scheduler.hisparse_coordinator is None:
        return original(queue, *args, **kwargs)
    aborted = [entry for entry in queue.queue if given_up.is_given_up(entry)]
    over = _on_every_rank(queue, [_is_over(entry) for entry in aborted])
    waiting = [entry for entry, done in zip(aborted, over, strict=True) if not done]
    with upstream.left_out(queue, waiting):
        return original(queue, *args, **kwargs)


def _is_over(entry: Any) -> bool:
    """The prefill worker has said that it has sent everything, or has had time to send what it had begun to."""
    if _has_said_so(entry):
        return True
    known, half, now = vars(entry), config.release_timeout(PATIENCE) / 2, time.monotonic()
    if now < known.setdefault("hisparse_since", now) + half:
        return False
    if "hisparse_withdrawn" not in known:
        known["hisparse_withdrawn"] = now
        _withdraw(entry.kv_receiver)
    over: bool = now >= known["hisparse_withdrawn"] + half
    if over and not known.setdefault("hisparse_unheard", False):
        known["hisparse_unheard"] = True
        waited, rows = now - known["hisparse_since"], upstream.allocated_len(entry.req)
        logger.warning(UNHEARD, entry.req.rid, waited, rows, config.RELEASE_VARIABLE)
    return over


def _withdraw(receiver: Any) -> None:
    """Leave a prefill worker that is not told of aborts no place to send to; what it has begun to send goes on.

    To it we are then a rank that is not used. From 0.5.13 an abort tells it.
    """
    told = getattr(receiver, "bootstrap_infos", None)
    if hasattr(receiver, "abort_notified") or not told:
        return
    import numpy

    with meanwhile(receiver, bootstrap_infos=[info | {"is_dummy": True} for info in told]):
        receiver.send_metadata(numpy.empty(0, dtype=numpy.int32))


def _has_said_so(entry: Any) -> bool:
    receiver, room = entry.kv_receiver, entry.req.bootstrap_room
    manager = getattr(receiver, "kv_mgr", None)
    if manager is None:  # SGLang's fake transfer to 0.5.19; nobody writes
        return True
    if getattr(manager, "enable_deferred_decode_kv_release", False):  # from 0.5.19, prefill workers say so
        return bool(manager.is_abort_release_safe(room, len(getattr(receiver, "bootstrap_infos", None) or ())))
    if getattr(manager, "request_status", {}).get(room) == upstream.poll_state("Success"):
        return True
    # From 0.5.20 an aborted transfer stays failed, but who has sent everything is still noted.
    done = getattr(manager, "prefill_response_tracker", {}).get(room, ())
    return bool(len(done) >= getattr(manager, "required_prefill_response_num_table", {}).get(room, math.inf))


def _on_every_rank(queue: Any, flags: list[bool]) -> list[bool]:
    """Every rank asks about the same requests."""
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
        "waits for the prefill worker from 0.5.21 (from 0.5.19 if told to), but forgets the host rows to 0.5.22, "
        "which it frees at once as before. The hook leaves such a request in the "
        "transfer queue, with all it holds, until the transfer is reported complete or 30 seconds have passed; only "
        "then its abort is answered. A prefill worker that is told of the abort (from 0.5.13) stops and reports "
        "nothing, so that 30 seconds are the rule there; on 0.5.21 and 0.5.22, if it acknowledges nothing, SGLang "
        "then waits another 30. Up to 0.5.12 it is not told: after 15 seconds the hook registers with it as a rank "
        "that needs no KV, so that nothing is sent that is not on its way by then."
    ),
    loses="with PD disaggregation, aborts during a transfer can corrupt the KV of other requests",
    rows=("waiting-abort",),
    origin="sgl-project/sglang, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE of 0.5.19",
    fixed_since="0.5.23",
    remove_when="the oldest supported release waits for the prefill worker",
    no_diff="SGLang 0.5.23 has its own, with acknowledgements by the prefill worker",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.DECODE}:{QUEUE}.pop_transferred", pop_transferred),
        given_up.HOOK,
    ),
)
