"""On a PD decode worker, KV that is computed again is asked for with an id and a room that nobody knows yet."""

from __future__ import annotations

import ast
import hashlib
from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .probing import existing, expect, expect_hookable, looks_at, probe

QUEUE = "DecodePreallocQueue"
CREATE, PAYLOAD = f"{QUEUE}._create_receiver_and_enqueue", "Req.build_rebootstrap_payload"


@probe
def judge(tree: SourceTree) -> Verdict:
    payload = tree.function(upstream.BATCH, PAYLOAD)
    if payload is None:
        return Absent("no KV is computed again")
    create = existing(tree.function(upstream.DECODE, CREATE), CREATE)
    asked = {name: _value(payload, name) for name in ("rid", "bootstrap_room")}
    if create.calls("req.renew_bootstrap") and asked["rid"] == "self.bootstrap_rid":
        return Fixed(f"{CREATE} renews both")
    expect(asked == {name: f"self.{name}" for name in asked}, "the request's own rid and bootstrap_room", f"{asked}")
    makes = [node for node in looks_at(create, "bootstrap_room") if isinstance(getattr(node, "ctx", None), ast.Store)]
    expect(not makes, f"{CREATE} leaves the room as it is", f"{len(makes)} assignments")
    expect_hookable(payload, "self")
    expect_hookable(create, "self", "req", "is_rebootstrap")
    resolve = f"{QUEUE}._resolve_prefill_dp_rank"
    expect_hookable(existing(tree.function(upstream.DECODE, resolve), resolve), "self", "req")
    return Defective(
        "KV is asked for again by the id and in the room of a request that the prefill worker may still have"
    )


def _value(payload: FunctionSource, name: str) -> str:
    """What the payload has under a name."""
    found = [
        ast.unparse(value)
        for node in ast.walk(payload.node)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == name
    ]
    return " or ".join(found)


def create_receiver_and_enqueue(original: Any, queue: Any, req: Any, is_rebootstrap: bool = False) -> Any:
    """Give a request whose KV is to be computed again another room, the same on every rank, and another id."""
    if queue.scheduler.hisparse_coordinator is not None and is_rebootstrap and _may_move(queue, req):
        req.bootstrap_room = _next(req.bootstrap_room)
        req.hisparse_rid = f"{req.rid}-{req.retraction_count}"
    return original(queue, req, is_rebootstrap)


def _may_move(queue: Any, req: Any) -> bool:
    """Which rank of the prefill server has the request is known, or follows from whatever room it has."""
    asks = hasattr(queue.kv_manager, "prefill_info_table")  # SGLang's fake one asks nobody
    return asks and queue._resolve_prefill_dp_rank(req) is not None


def _next(room: int) -> int:
    """A room that nobody else has: 63 bits, as random as routers' own."""
    return int.from_bytes(hashlib.blake2b(str(room).encode(), digest_size=8).digest(), "big") >> 1


def build_rebootstrap_payload(original: Any, req: Any) -> Any:
    """Under the id that it was given for this; a prefill worker is told of an abort by the room."""
    return original(req) | {"rid": getattr(req, "hisparse_rid", req.rid)}


OVERLAY = Overlay(
    id="rebootstrap-room",
    symptom="with PD disaggregation, a request that is retracted soon after its KV came ends with error 500, or late",
    why=(
        "A prefill worker that computes KV again is asked by the request's own id, in its own room. It may have sent "
        "the KV and not have answered yet: then it refuses the id as a duplicate, and the request ends with error 500. "
        "What it was told of the room is forgotten when it does answer, and the transfer never begins. The hooks give "
        "each such transfer an id and a room of its own. Where a prefill server with data parallelism balances by "
        "anything but the room, only the room says who has it, and both stay as they are."
    ),
    loses="with PD disaggregation, a request retracted twice in a short time can fail",
    rows=("pd-retract",),
    origin="not reported upstream",
    remove_when="the oldest supported release asks by an id and room of their own",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.DECODE}:{CREATE}", create_receiver_and_enqueue),
        Hook(f"{upstream.BATCH}:{PAYLOAD}", build_rebootstrap_payload),
    ),
)
