"""A request admitted with its KV is not taken for one that is staging."""

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
    admit = existing(
        upstream.coordinator_method(tree, "admit_request_direct"), "HiSparseCoordinator.admit_request_direct"
    )
    right, wrong = admit.assigns("req.hisparse_staging"), admit.assigns("req.staging")
    cleared = [node for node in (*right, *wrong) if ast.unparse(node.value) == "False" and not admit.blocks(node)]
    cleared = [node for node in cleared if conjuncts(admit.guards(node)) <= {"not self.is_dsv4_hisparse"}]
    expect(len(cleared) == 1, "one flag cleared: req.hisparse_staging or req.staging", f"{len(right)} and {len(wrong)}")
    if right:
        return Fixed("admit_request_direct clears req.hisparse_staging")
    expect_hookable(admit, "self", "req")
    return Defective("admit_request_direct clears req.staging, which nobody reads")


def admit_request_direct(original: Any, coordinator: Any, req: Any) -> Any:
    """Clear the flag that everybody reads."""
    result = original(coordinator, req)
    req.hisparse_staging = False
    return result


OVERLAY = Overlay(
    id="direct-flag",
    symptom="a request admitted with its KV can be taken for one that is staging, and its hot buffer leaks",
    why=(
        "admit_request_direct clears req.staging; retract_req and everybody else read req.hisparse_staging. If that is "
        "set, a retraction undoes a staging that is over and leaves the hot buffer. The hook clears it."
    ),
    loses="retraction of a request that was staging before leaks its hot buffer",
    rows=("direct-flag",),
    origin="sgl-project/sglang 0.5.12",
    remove_when="0.5.12 is the oldest supported release",
    fixed_since="0.5.12",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.COORDINATOR}:HiSparseCoordinator.admit_request_direct", admit_request_direct),
    ),
)
