"""A request that names tokens whose logprobs it wants does not end the server when another names none."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

NAME = "get_token_ids_logprobs_raw"
NOBODY = ["stage == LogprobStage.DECODE", "token_ids is None"]


@probe
def judge(tree: SourceTree) -> Verdict:
    found = (tree.function(module, NAME) for module in upstream.LOGPROBS)
    gather = existing(next(filter(None, found), None), NAME)
    process = existing(upstream.scheduler_method(tree, "process_batch_result"), "Scheduler.process_batch_result")
    lists = [c for c in gather.calls("vals.append") if gather.guards(c) == NOBODY and ast.unparse(c.args[0]) == "[]"]
    if not lists:
        tensors = [c for c in gather.calls("logprobs.new_empty") if gather.guards(c)[: len(NOBODY)] == NOBODY]
        expect(len(tensors) == 1, "logprobs.new_empty for whoever names no tokens", f"{len(tensors)} such calls")
        return Fixed("who names no tokens gets an empty tensor")
    expect_hookable(process, "self", "batch", "result")
    return Defective("who names no tokens gets a list, where tensors are looked for")


def process_batch_result(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    import torch

    output: Any = getattr(result, "logits_output", None)
    found = getattr(output, "next_token_token_ids_logprobs_val", None)
    if scheduler.hisparse_coordinator is not None and found:
        output.next_token_token_ids_logprobs_val = [v if torch.is_tensor(v) else torch.tensor(v) for v in found]
    return original(scheduler, batch, result)


OVERLAY = Overlay(
    id="logprob-none",
    symptom="a request with token_ids_logprob beside one without ends the server, with HiSparse or without",
    why=(
        "In a step of decode where somebody names tokens whose logprobs it wants, SGLang makes a tensor for each who "
        "does and a list for the others, and takes all for tensors. The hook makes tensors of the lists before they "
        "are read."
    ),
    loses="two clients that decode together, one of whom names tokens with token_ids_logprob, end the server",
    rows=(),
    origin="sgl-project/sglang 0.5.21, which makes a tensor for each",
    remove_when="0.5.21 is the oldest supported release",
    fixed_since="0.5.21",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.process_batch_result", process_batch_result),),
)
