"""The running batch is not taken for full for ever."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    schedule = existing(upstream.scheduler_method(tree, "get_next_batch_to_run"), "Scheduler.get_next_batch_to_run")
    collects = schedule.calls("collect_ready_reqs")
    expect(
        len(collects) == 1 and conjuncts(schedule.guards(collects[0])) == {"self.enable_hisparse"},
        "one call of collect_ready_reqs under if self.enable_hisparse",
        "; ".join(" and ".join(schedule.guards(call)) or "unconditional" for call in collects) or "none",
    )
    resets = [
        node
        for node in schedule.assigns("running_batch.batch_is_full")
        if ast.unparse(node.value) == "False" and not schedule.blocks(node)
    ]
    guards = [conjuncts(schedule.guards(node)) for node in resets]
    if any(found <= {"self.enable_hisparse"} for found in guards):
        return Fixed("get_next_batch_to_run resets batch_is_full")
    partial = [" and ".join(sorted(found)) for found in guards if "self.enable_hisparse" in found]
    expect(not partial, "batch_is_full reset whenever HiSparse is on", "; ".join(partial))
    expect_hookable(schedule, "self")
    return Defective("get_next_batch_to_run never resets batch_is_full when HiSparse is on")


def get_next_batch_to_run(original: Any, scheduler: Any) -> Any:
    """Every iteration looks anew whether there is room."""
    if scheduler.hisparse_coordinator is not None:
        scheduler.running_batch.batch_is_full = False
    return original(scheduler)


OVERLAY = Overlay(
    id="batch-full",
    symptom="waiting requests are never scheduled although the server is idle",
    why=(
        "batch_is_full is reset when requests leave a batch that decodes, and where a prefill batch is merged into the "
        "running one, which HiSparse does in its own way and without the reset. If neither happens the flag stays. The "
        "hook resets it before each decision; whether there is room is then looked up, not remembered."
    ),
    loses="waiting requests can starve, for ever if the running batch is empty",
    rows=("batch-full",),
    origin="sgl-project/sglang#22131",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.get_next_batch_to_run", get_next_batch_to_run),),
)
