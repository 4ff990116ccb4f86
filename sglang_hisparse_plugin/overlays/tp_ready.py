"""Every rank that has a request takes part in the vote on whether it may decode."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, expect_plain, probe

PARALLEL, SOMEBODY = "self.tp_world_size > 1", "len(self.ack_staging_queue) != 0"
#: What may let a lone rank leave early.
NOT_ALONE = "not (self.tp_world_size == 1 and len(self.ack_staging_queue) == 0)"
VOTE = "torch.tensor(finish_count, dtype=torch.int, device='cpu')"


COLLECT, INIT = "collect_ready_reqs", "__init__"


@probe
def judge(tree: SourceTree) -> Verdict:
    early, group = _early(tree), _group(tree)
    return early if isinstance(group, Fixed) or isinstance(early, Defective) else group


def _early(tree: SourceTree) -> Verdict:
    collect = existing(upstream.coordinator_method(tree, COLLECT), COLLECT)
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


def _group(tree: SourceTree) -> Verdict:
    init = existing(upstream.coordinator_method(tree, INIT), f"HiSparseCoordinator.{INIT}")
    groups = [node.value for node in init.assigns("self.tp_group")]
    sizes = [ast.unparse(node.value) for node in init.assigns("self.tp_world_size")]
    given = [ast.unparse(group) for group in groups]
    expect(
        len(groups) == 1 and sizes == ["torch.distributed.get_world_size(group=self.tp_group)"],
        "self.tp_group, and self.tp_world_size of it",
        f"{', '.join(given)}; {', '.join(sizes)}",
    )
    if isinstance(groups[0], ast.Call) and [ast.unparse(arg) for arg in groups[0].args] == ["tp_group"]:
        made = list(tree.callees(init, [groups[0]]))
        if any(function.calls("get_attn_cp_group") for function in made):
            return Fixed("ranks of attention context parallelism vote, too")
    expect(given == ["tp_group"], "self.tp_group = tp_group", f"self.tp_group = {given[0]}")
    expect_plain(init)
    return Defective("under DP attention ranks that share a request's context vote apart")


def collect_ready_reqs(original: Any, coordinator: Any) -> Any:
    """A rank with an empty queue votes for nobody; the original then has nothing to do and does not vote again."""
    if coordinator.tp_world_size > 1 and not coordinator.ack_staging_queue:
        import torch

        nobody = torch.tensor(0, dtype=torch.int, device="cpu")
        torch.distributed.all_reduce(nobody, op=torch.distributed.ReduceOp.MIN, group=coordinator.tp_group)
    return original(coordinator)


def init(original: Any, coordinator: Any, *args: Any, **kwargs: Any) -> None:
    """The group that votes is that of all ranks which have the same requests."""
    original(coordinator, *args, **kwargs)
    import torch

    ranks = upstream.ranks_with_same_requests()
    if not ranks <= {*torch.distributed.get_process_group_ranks(coordinator.tp_group)}:
        # The other groups of a server need not come here: they have as many ranks, and none of these.
        group = torch.distributed.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)
        coordinator.tp_group, coordinator.tp_world_size = group, len(ranks)


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    where = f"{upstream.COORDINATOR}:HiSparseCoordinator"
    parts = [(_early, COLLECT, collect_ready_reqs), (_group, INIT, init)]
    return tuple(Hook(f"{where}.{name}", hook) for judged, name, hook in parts if isinstance(judged(tree), Defective))


OVERLAY = Overlay(
    id="tp-ready",
    symptom="ranks that share requests and disagree about who is staging wait for each other for ever",
    why=(
        "Ranks agree on how many staged requests may decode by an all-reduce, but a rank whose staging queue is empty "
        "returns before it. A rank that has somebody staging then waits alone, and the next collective operation of "
        "the others meets its vote. The hook lets a rank with an empty queue vote for nobody. It costs an all-reduce "
        "of four bytes on the CPU in each iteration without staging. "
        "Under DP attention the vote is one of the attention's tensor-parallel group, and the ranks that share a "
        "prompt's context (prefill context parallelism) have the same requests and vote apart: one decodes what "
        "another still stages, and the next collective operation of their model meets another. The hook lets all "
        "ranks that have the same requests vote together."
    ),
    loses="with tensor or context parallelism, a rank that comes to staging later than the others hangs the server",
    rows=("tp-ready",),
    origin="not reported upstream",
    remove_when="collect_ready_reqs votes in any case in the oldest supported release",
    probe=judge,
    hooks=hooks,
)
