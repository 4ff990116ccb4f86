"""A request gives its HiSparse slots back before its request slot."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_free, expect_hookable, probe, tells


@probe
def judge(tree: SourceTree) -> Verdict:
    release = existing(upstream.release_req(tree), "release_req")
    free = expect_free(release, [set()])
    if tells(tree, release, "retract_req", free, "not req.finished()"):
        return Fixed("release_req tells the coordinator first")
    expect(release.qualname == "ScheduleBatch.release_req", "release_req of ScheduleBatch", f"{release.target}")
    expect_hookable(release, "self", "idx", more=True)
    chosen = [ast.unparse(node.value) for node in release.assigns("req")]
    expect(chosen == ["self.reqs[idx]"], "req = self.reqs[idx]", "; ".join(chosen) or "no assignment to req")
    return Defective("release_req frees the request's slot and never tells the coordinator")


def release_req(original: Any, batch: Any, idx: int, *args: Any, **kwargs: Any) -> Any:
    """Tell the coordinator while it can still find the request's rows."""
    if batch.hisparse_coordinator is not None:
        batch.hisparse_coordinator.retract_req(batch.reqs[idx])
    return original(batch, idx, *args, **kwargs)


OVERLAY = Overlay(
    id="retract-order",
    symptom="retraction, preemption and pause leak a request's hot buffer and host slots, or end the server",
    why=(
        "The coordinator keeps a request's rows under its slot. release_req gives the slot up; update_running_batch "
        "asks the coordinator afterwards, which fails, and the other callers (priority preemption, pause, abort of the "
        "last request when memory is out) never ask. The hook asks in release_req, before anything is given up."
    ),
    loses="every retraction ends the server or leaks hot-buffer and host slots",
    rows=("retract-order", "other-releasers", "readmit"),
    origin="sgl-project/sglang#22131",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    requires=("retract-once", "finish-unbuffered"),
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.BATCH}:ScheduleBatch.release_req", release_req),),
)
