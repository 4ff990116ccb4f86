"""A request that finishes on its first token after a PD transfer gives its slots back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .probing import existing, expect, expect_free, expect_hookable, probe, tells


def _prebuilt(tree: SourceTree) -> FunctionSource:
    return existing(upstream.result_method(tree, "process_batch_result_prebuilt"), "process_batch_result_prebuilt")


@probe
def judge(tree: SourceTree) -> Verdict:
    prebuilt = _prebuilt(tree)
    free = expect_free(prebuilt, [{"req.finished()"}], within=["for req in batch.reqs:"])
    if tells(tree, prebuilt, "request_finished", free):
        return Fixed("process_batch_result_prebuilt tells the coordinator first")
    expect_hookable(prebuilt, "self", "batch")
    asks = prebuilt.calls("req.check_finished")
    expect(
        len(asks) == 1 and not prebuilt.guards(asks[0]) and prebuilt.blocks(asks[0]) == prebuilt.blocks(free),
        "one call of req.check_finished for each request",
        "another number",
    )
    return Defective("process_batch_result_prebuilt frees a finished request and never tells the coordinator")


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
