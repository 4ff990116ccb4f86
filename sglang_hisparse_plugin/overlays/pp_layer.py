"""On every pipeline stage, swap-in finds its layer's tables, and the same requests start to decode."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from ..patching.syntax import ends_with
from .probing import conjuncts, existing, expect, expect_hookable, expect_plain, probe

METHOD = "swap_in_selected_pages"
COLLECT = "collect_ready_reqs"
TABLE = "req_device_buffer_tokens"
FIRST = "self.mem_pool_device.start_layer"
#: DeepSeek-V4's tables are looked up by the compressed layer, which has a numbering of its own.
NOT_V4 = "not self.is_dsv4_hisparse"


@probe
def judge(tree: SourceTree) -> Verdict:
    layer, start = _layers(tree), _starts(tree)
    return layer if isinstance(start, Fixed) or isinstance(layer, Defective) else start


def _starts(tree: SourceTree) -> Verdict:
    collect = existing(upstream.coordinator_method(tree, COLLECT), COLLECT)
    if collect.calls("finish_event.synchronize"):
        return Fixed(f"{COLLECT} waits for the transfers where there are stages")
    expect(
        len(collect.calls("finish_event.query")) == 1, "one finish_event.query() asked", "another way to tell the end"
    )
    expect_hookable(collect, "self")
    return Defective("each stage lets requests decode when its own transfers have ended, not when all stages do")


def _layers(tree: SourceTree) -> Verdict:
    entry = existing(upstream.coordinator_method(tree, METHOD), METHOD)
    kernel = upstream.coordinator_method(tree, "_run_swap_in_kernel") or entry
    rows = {ast.unparse(n.slice) for n in ast.walk(kernel.node) if isinstance(n, ast.Subscript) and _is_table(n)}
    expect(rows == {"layer_id"}, f"self.{TABLE}[layer_id]", ", ".join(sorted(rows)) or "no such table")
    shifts = [
        node for function in {entry, kernel} for node in ast.walk(function.node) if ends_with(node, "start_layer")
    ]
    if shifts:
        expect(_made_local(entry), f"layer_id -= {FIRST} before layer_id is used", "another use of start_layer")
        return Fixed(f"{METHOD} counts layers from the first of its stage")
    expect_plain(entry)
    expect(
        entry.parameters == entry.positional and entry.positional[-1] == "layer_id",
        f"{METHOD}(..., layer_id)",
        ", ".join(entry.parameters),
    )
    return Defective(f"{METHOD} looks up tables that have a row for each layer of the stage by the layer of the model")


def _is_table(node: ast.Subscript) -> bool:
    return ends_with(node.value, TABLE)


def _made_local(entry: FunctionSource) -> bool:
    """Whether `layer_id` is made local before it is used."""
    seen = [n.lineno for n in ast.walk(entry.node) if isinstance(n, ast.Name) and n.id == "layer_id"]
    return any(
        isinstance(node, ast.AugAssign)
        and ast.unparse(node) == f"layer_id -= {FIRST}"
        and conjuncts(entry.guards(node)) <= {NOT_V4}
        and not entry.blocks(node)
        and node.lineno == min(seen)
        for node in ast.walk(entry.node)
    )


def swap_in_selected_pages(original: Any, coordinator: Any, *args: Any, **kwargs: Any) -> Any:
    """Count layers from the first of this pipeline stage, as the tables do. The layer is the last argument."""
    first = 0 if getattr(coordinator, "is_dsv4_hisparse", False) else coordinator.mem_pool_device.start_layer
    if first and "layer_id" in kwargs:
        kwargs["layer_id"] -= first
    elif first:
        args = (*args[:-1], args[-1] - first)
    return original(coordinator, *args, **kwargs)


def collect_ready_reqs(original: Any, coordinator: Any) -> Any:
    """Stages ask in the same pass and do not talk to each other: where all transfers have ended, all find the same."""
    if upstream.pipeline_stages() > 1:
        for act in coordinator.ack_staging_queue:
            act.finish_event.synchronize()
    return original(coordinator)


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    where = f"{upstream.COORDINATOR}:HiSparseCoordinator"
    parts = [(_layers, METHOD, swap_in_selected_pages), (_starts, COLLECT, collect_ready_reqs)]
    return tuple(Hook(f"{where}.{name}", hook) for judged, name, hook in parts if isinstance(judged(tree), Defective))


OVERLAY = Overlay(
    id="pp-layer",
    symptom="with pipeline parallelism, the first decode on any stage but the first ends the server",
    why=(
        "Attention asks for the rows of its layer, counted from the start of the model. The coordinator's tables and "
        "pools have a row for each layer of this pipeline stage, so that the lookup is out of range or, where stages "
        "overlap in number, finds another layer's. The hook counts from the first layer of the stage. "
        "Each stage lets a request decode when its own copy of the prompt to the host pool has ended. Stages that "
        "disagree compute different batches, or wait for each other for ever. With more than one stage the hook waits "
        "for the copies under way before it is decided who decodes."
    ),
    loses="pipeline parallelism does not work",
    rows=("pp-layer",),
    origin="sgl-project/sglang#36331, open",
    remove_when="swap_in_selected_pages subtracts start_layer in the oldest supported release",
    probe=judge,
    hooks=hooks,
)
