"""A decode step knows the requests' slots from the requests, and does not ask the device for them."""

from __future__ import annotations

import ast
import sys
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .meanwhile import meanwhile
from .probing import existing, expect, expect_hookable, probe

MAP = "map_last_loc_to_buffer"
PREPARE = "ScheduleBatch.prepare_for_decode"
SLOTS = "req_pool_indices"


@probe
def judge(tree: SourceTree) -> Verdict:
    maps = existing(upstream.coordinator_method(tree, MAP), f"HiSparseCoordinator.{MAP}")
    prepare = existing(tree.function(upstream.BATCH, PREPARE), PREPARE)
    calls = prepare.calls(f"hisparse_coordinator.{MAP}")
    expect(len(calls) == 1, f"one call of {MAP} in {PREPARE}", f"{len(calls)}")
    call, given = calls[0], [ast.unparse(argument) for argument in calls[0].args]
    expect(f"self.{SLOTS}" in given, f"{MAP}(..., self.{SLOTS}, ...)", ", ".join(given))
    read = [ast.unparse(copy) for copy in maps.calls("cpu")]
    if f"{SLOTS}_cpu" in maps.parameters:
        handed = [ast.unparse(copy) for copy in prepare.calls("cpu") if call in prepare.way_to(copy)]
        expect(not read and not handed, "slots that are on the host already", "; ".join([*read, *handed]))
        return Fixed(f"{MAP} is given the slots on the host")
    expect(read == [f"{SLOTS}.cpu()"], f"{SLOTS}.cpu(), once", "; ".join(read) or "no such copy")
    expect_hookable(prepare, "self")
    return Defective(f"{MAP} copies the slots from the device in every step")


def prepare_for_decode(original: Any, batch: Any) -> Any:
    """`req_pool_indices`, (requests,) int64 on the device, answers `cpu` with the slots that the requests know."""
    if batch.hisparse_coordinator is None or not batch.spec_algorithm.is_none():
        return original(batch)
    known = [upstream.slot(req) for req in batch.reqs]
    if None in known or len(known) != len(batch.req_pool_indices):
        return original(batch)
    host = sys.modules["torch"].tensor(known, dtype=batch.req_pool_indices.dtype)
    with meanwhile(batch.req_pool_indices, cpu=lambda: host):
        return original(batch)


OVERLAY = Overlay(
    id="cpu-sync",
    symptom="every decode step waits for the device to say which slots its requests have",
    why=(
        "map_last_loc_to_buffer copies the requests' slots from the device, which waits for everything the scheduler "
        "has queued there. The requests know their slots on the host. The hook lets the tensor of slots answer that "
        "one question from there while a step is prepared."
    ),
    loses="the scheduler waits for the device in every decode step",
    rows=("cpu-sync",),
    origin="sgl-project/sglang#26425",
    remove_when="0.5.13 is the oldest supported release",
    fixed_since="0.5.13",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.BATCH}:{PREPARE}", prepare_for_decode),),
)
