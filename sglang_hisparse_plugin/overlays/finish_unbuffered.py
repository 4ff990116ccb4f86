"""A request that ends before it has a hot buffer keeps the mapping by which its device slots are freed."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..patching.syntax import ends_with
from .probing import conjuncts, existing, expect, expect_hookable, probe

MAPPING = "full_to_hisparse_device_index_mapping"


@probe
def judge(tree: SourceTree) -> Verdict:
    finished = existing(upstream.coordinator_method(tree, "request_finished"), "HiSparseCoordinator.request_finished")
    clears = [
        node
        for node in ast.walk(finished.node)
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Subscript) and ends_with(t.value, MAPPING) for t in node.targets)
    ]
    expect(len(clears) == 1, f"one assignment to {MAPPING}[...]", f"{len(clears)}")
    capacities = [ast.unparse(node.value) for node in finished.assigns("current_cap")]
    expect(
        len(capacities) == 1 and "self.req_device_buffer_size[" in capacities[0],
        "the hot buffer's size read from req_device_buffer_size into current_cap",
        ", ".join(capacities) or "no such assignment",
    )
    expect(not finished.blocks(clears[0]), "the mapping cleared outside loops", "; ".join(finished.blocks(clears[0])))
    guards = conjuncts(finished.guards(clears[0]))
    if not guards:
        expect_hookable(finished, "self", "req")
        return Defective("request_finished clears the mapping of every request")
    expect(guards == {"current_cap > 0"}, "the mapping cleared always, or if current_cap > 0", "; ".join(guards))
    return Fixed("request_finished clears the mapping only of a request that has a hot buffer")


def request_finished(original: Any, coordinator: Any, req: Any) -> Any:
    """Put the mapping back, for `release_kv_cache` to free the device slots that prefill allocated."""
    if int(coordinator.req_device_buffer_size[upstream.slot(req)]) > 0:
        return original(coordinator, req)
    mapping, positions = upstream.mapping_of(coordinator, req)
    owned = mapping[positions]
    result = original(coordinator, req)
    mapping[positions] = owned
    return result


OVERLAY = Overlay(
    id="finish-unbuffered",
    symptom="a request retracted between prefill and staging loses its device slots for good",
    why=(
        "Until a request has a hot buffer its device slots are found through the mapping from logical slots, which "
        "release_kv_cache follows after the coordinator is done. request_finished clears the mapping in any case, so "
        "that the slots belong to nobody. The hook restores it when there was no hot buffer."
    ),
    loses="a pause that retracts a request in the middle of a chunked prefill leaks its device slots",
    rows=("other-releasers",),
    origin="sgl-project/sglang 0.5.22, which does the same in its speculative decoding rewrite",
    remove_when="0.5.22 is the oldest supported release",
    fixed_since="0.5.22",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.COORDINATOR}:HiSparseCoordinator.request_finished", request_finished),),
)
