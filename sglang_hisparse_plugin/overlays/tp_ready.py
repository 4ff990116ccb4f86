"""Every tensor-parallel rank takes part in the vote on who may decode."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, probe

PARALLEL, SOMEBODY = "self.tp_world_size > 1", "len(self.ack_staging_queue) != 0"
#: What may let a lone rank leave early.
NOT_ALONE = "not (self.tp_world_size == 1 and len(self.ack_staging_queue) == 0)"
VOTE = "torch.tensor(finish_count, dtype=torch.int, device='cpu')"


@probe
def judge(tree: SourceTree) -> Verdict:
    collect = existing(upstream.coordinator_method(tree, "collect_ready_reqs"), "collect_ready_reqs")
    votes = collect.calls("torch.distributed.all_reduce")
    cast = [ast.unparse(node.value) for node in collect.assigns("queue_size")]
    expect(
        len(votes) == 1 and not collect.blocks(votes[0]) and cast == [VOTE],
        f"one all_reduce of {VOTE}",
        f"{len(votes)} of {', '.join(cast) or 'something else'}",
    )
    guards = conjuncts(collect.guards(votes[0]))
    if {PARALLEL} <= guards <= {PARALLEL, NOT_ALONE}:
        return Fixed("collect_ready_reqs votes whether or not this rank has somebody in staging")
    expect(guards == {PARALLEL, SOMEBODY}, f"a vote if {PARALLEL}, and perhaps {SOMEBODY}", " and ".join(guards))
    expect_hookable(collect, "self")
    return Defective("collect_ready_reqs leaves before the vote of all ranks when this rank has nobody in staging")


def collect_ready_reqs(original: Any, coordinator: Any) -> Any:
    """A rank with an empty queue votes for nobody; the original then has nothing to do and does not vote again."""
    if coordinator.tp_world_size > 1 and not coordinator.ack_staging_queue:
        import torch

        nobody = torch.tensor(0, dtype=torch.int, device="cpu")
        torch.distributed.all_reduce(nobody, op=torch.distributed.ReduceOp.MIN, group=coordinator.tp_group)
    return original(coordinator)


OVERLAY = Overlay(
    id="tp-ready",
    symptom="with tensor parallelism, ranks that disagree about who is staging wait for each other for ever",
    why=(
        "Ranks agree on how many staged requests may decode by an all-reduce, but a rank whose staging queue is empty "
        "returns before it. A rank that has somebody staging then waits alone, and the next collective operation of "
        "the others meets its vote. The hook lets a rank with an empty queue vote for nobody. It costs an all-reduce "
        "of four bytes on the CPU in each iteration without staging."
    ),
    loses="with tensor parallelism, a rank that comes to staging later than the others hangs the server",
    rows=("tp-ready",),
    origin="not reported upstream",
    remove_when="collect_ready_reqs votes in any case in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.COORDINATOR}:HiSparseCoordinator.collect_ready_reqs", collect_ready_reqs),),
)
