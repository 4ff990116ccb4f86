"""Retracting a request that holds nothing does nothing."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from ..patching.syntax import ends_with
from .probing import conjuncts, existing, expect, expect_hookable, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    retract = existing(upstream.coordinator_method(tree, "retract_req"), "HiSparseCoordinator.retract_req")
    if _returns_early(retract):
        return Fixed("retract_req returns at once for a finished request")
    expect(
        _branches(retract)
        == {"abort_staging_request": {"req.hisparse_staging"}, "request_finished": {"not req.hisparse_staging"}},
        "abort_staging_request for a request that is staging, else request_finished",
        str(_branches(retract)),
    )
    expect_hookable(retract, "self", "req")
    release = existing(upstream.release_req(tree), "release_req")
    update = existing(upstream.scheduler_method(tree, "update_running_batch"), "Scheduler.update_running_batch")
    if update.calls("retract_req"):
        return Defective("update_running_batch retracts requests whose slot release_req has already given up")
    calls = release.calls("retract_req")
    told = [call for call in calls if ends_with(call.func, "hisparse_coordinator.retract_req")]
    if len(calls) == len(told) == 1 and "not req.finished()" in conjuncts(release.guards(calls[0])):
        return Fixed("release_req, its only caller, leaves out finished requests")
    return Defective("release_req retracts finished requests, whose slot may be another's by now")


def _returns_early(function: FunctionSource) -> bool:
    """Whether a finished request is sent back before anything is done with it."""
    for statement in function.node.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[0], ast.Return):
            test = statement.test
            either = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else [test]
            if any(ast.unparse(part) == "req.finished()" for part in either):
                return True
        elif any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            return False
    return False


def _branches(function: FunctionSource) -> dict[str, set[str]]:
    calls = [n for n in ast.walk(function.node) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("self.")]
    return {ast.unparse(call.func).removeprefix("self."): conjuncts(function.guards(call)) for call in calls}


def retract_req(original: Any, coordinator: Any, req: Any) -> Any:
    """Pass on only a request that still has its slot and is not finished."""
    if upstream.slot(req) is None or req.finished():
        return None
    return original(coordinator, req)


OVERLAY = Overlay(
    id="retract-once",
    symptom="a second retraction of the same request, or one of a finished request, ends the server",
    why=(
        "retract_req looks the request's rows up by its slot. When release_req has given the slot up already there is "
        "none, and what is then done raises an exception that ends the scheduler. The hook makes it a no-op."
    ),
    loses="the first retraction under memory pressure ends the server",
    rows=("retract-order", "finished-release"),
    origin="sgl-project/sglang#22131 removes the second call; 0.5.12 adds the test for finished requests",
    remove_when="0.5.12 is the oldest supported release",
    fixed_since="0.5.12",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.COORDINATOR}:HiSparseCoordinator.retract_req", retract_req),),
)
