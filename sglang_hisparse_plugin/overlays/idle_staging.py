"""A scheduler with requests in staging is not idle."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..patching.syntax import ends_with
from .probing import conjuncts, existing, expect, expect_hookable, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    idle = existing(upstream.scheduler_method(tree, "is_fully_idle"), "Scheduler.is_fully_idle")
    existing(upstream.coordinator_method(tree, "has_ongoing_staging"), "HiSparseCoordinator.has_ongoing_staging")
    asks = idle.calls("has_ongoing_staging")
    if not asks:
        expect_hookable(idle, "self", "for_health_check")
        return Defective("is_fully_idle does not look at the staging queue")
    expect(
        ends_with(asks[0].func, "hisparse_coordinator.has_ongoing_staging")
        and not any(isinstance(node, ast.Expr) for node in idle.way_to(asks[0])),
        "hisparse_coordinator.has_ongoing_staging() to count",
        "a call of has_ongoing_staging that changes nothing",
    )
    guards = conjuncts(idle.guards(asks[0]))
    expect(
        guards <= {"self.enable_hisparse", "not for_health_check"},
        "the staging queue looked at whenever HiSparse is on, health checks apart",
        "; ".join(sorted(guards)),
    )
    return Fixed("is_fully_idle looks at the staging queue")


def is_fully_idle(original: Any, scheduler: Any, for_health_check: bool = False, **kwargs: Any) -> Any:
    """A health check asks for something else: whether a running request will answer it. Staging ones run nothing."""
    idle = original(scheduler, for_health_check, **kwargs)
    coordinator = scheduler.hisparse_coordinator
    if idle and coordinator is not None and not for_health_check:
        return not coordinator.has_ongoing_staging()
    return idle


OVERLAY = Overlay(
    id="idle-staging",
    symptom="flushing the cache or updating weights pulls the memory away under requests that are staging",
    why=(
        "Between prefill and decode a request is in no batch and no queue of the scheduler, only in the coordinator's. "
        "is_fully_idle, which guards flush_cache, release of memory and attaching of storage, does not look there. The "
        "hook does."
    ),
    loses="flushing the cache while a request is staging corrupts it",
    rows=(),
    origin="sgl-project/sglang, between 0.5.10.post1 and 0.5.11",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.is_fully_idle", is_fully_idle),),
)
