"""A request that finishes on its first token after a PD transfer gives its slots back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .probing import conjuncts, existing, expect, expect_parameters, probe


def _prebuilt(tree: SourceTree) -> FunctionSource:
    return existing(upstream.result_method(tree, "process_batch_result_prebuilt"), "process_batch_result_prebuilt")


@probe
def judge(tree: SourceTree) -> Verdict:
    prebuilt = _prebuilt(tree)
    frees = prebuilt.calls("release_kv_cache")
    expect(
        len(frees) == 1 and conjuncts(prebuilt.guards(frees[0])) == {"req.finished()"},
        "one release_kv_cache for each finished request",
        "; ".join(" and ".join(prebuilt.guards(call)) or "unconditional" for call in frees) or "none",
    )
    tells = prebuilt.calls("request_finished")
    if not tells:
        expect_parameters(prebuilt, "self", "batch")
        expect(len(prebuilt.calls("req.check_finished")) == 1, "one call of req.check_finished", "another number")
        return Defective("process_batch_result_prebuilt frees a finished request and never tells the coordinator")
    expect(
        len(tells) == 1 and tells[0].lineno < frees[0].lineno,
        "request_finished before release_kv_cache",
        "another order",
    )
    return Fixed("process_batch_result_prebuilt tells the coordinator first")


def process_batch_result_prebuilt(original: Any, scheduler: Any, batch: Any) -> Any:
    """Ask who is finished as the original is about to, for asking twice changes nothing, and tell the coordinator."""
    coordinator = scheduler.hisparse_coordinator
    if coordinator is not None:
        for req in batch.reqs:
            req.check_finished()
            if req.finished():
                coordinator.request_finished(req)
    return original(scheduler, batch)


OVERLAY = Overlay(
    id="quick-finish",
    symptom="with PD disaggregation, a request that ends with its first token leaks its hot buffer and host slots",
    why=(
        "A request that came with its KV has a hot buffer and host slots before it runs. When its first token ends it, "
        "only its logical slots are released. The hook tells the coordinator of each finished request first."
    ),
    loses="with PD disaggregation every request of one token leaks its hot buffer and host slots",
    rows=("quick-finish",),
    origin="sgl-project/sglang, between 0.5.10.post1 and 0.5.11",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    probe=judge,
    hooks=lambda tree: (Hook(_prebuilt(tree).target, process_batch_result_prebuilt),),
)
