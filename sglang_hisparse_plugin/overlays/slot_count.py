"""Prompts on their way to decode count as holders of a slot."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, probe

METHOD = "get_num_allocatable_reqs"


@probe
def judge(tree: SourceTree) -> Verdict:
    count = existing(upstream.scheduler_method(tree, METHOD), f"Scheduler.{METHOD}")
    looks = count.calls("req_to_token_pool.available_size")
    expect(len(looks) == 1, "one look at the free slots", f"{len(looks)}")
    guards = conjuncts(count.guards(looks[0]))
    bounds = [call for call in count.calls("min") if conjuncts(count.guards(call)) == guards and not count.blocks(call)]
    expect(bool(bounds), "the free slots as an upper bound, min(...)", "no such min")
    if not guards or guards == {"self.pp_size > 1 or self.enable_hisparse"}:
        return Fixed(f"{METHOD} never exceeds the free slots")
    expect(guards == {"self.pp_size > 1"}, "a look at the free slots under pipeline parallelism", "; ".join(guards))
    expect_hookable(count, "self", "running_bs")
    returned = [ast.unparse(node) for node in ast.walk(count.node) if isinstance(node, ast.Return)]
    expect(len(returned) == 1, "one return", "; ".join(returned))
    return Defective(f"{METHOD} looks at the free slots only under pipeline parallelism")


def get_num_allocatable_reqs(original: Any, scheduler: Any, running_bs: int) -> Any:
    """No more than there are slots; a prompt that is prefilled in chunks has one already."""
    room = original(scheduler, running_bs)
    if scheduler.hisparse_coordinator is None:
        return room
    return min(room, scheduler.req_to_token_pool.available_size() + (scheduler.chunked_req is not None))


OVERLAY = Overlay(
    id="slot-count",
    symptom="more requests at once than --max-running-requests end the server",
    why=(
        "How many requests may be prefilled is the limit less those that decode. With HiSparse a prefilled request "
        "joins them only when its staging has finished, and until then it holds a slot that nobody counts: the next "
        "prefill batch asks for slots that are not there, and alloc_req_slots raises. The hook caps the number by the "
        "free slots."
    ),
    loses="more requests at once than --max-running-requests can end the server",
    rows=("batch-full",),
    origin="not reported upstream; seen with this plugin's demo",
    remove_when="0.5.12 is the oldest supported release",
    fixed_since="0.5.12",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", get_num_allocatable_reqs),),
)
