"""A request that names tokens whose logprobs it wants does not end the server when another names none."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Around, Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, probe

NAME = "get_token_ids_logprobs_raw"
NOBODY = ["stage == LogprobStage.DECODE", "token_ids is None"]
PREFILL = "stage != LogprobStage.DECODE"


@probe
def judge(tree: SourceTree) -> Verdict:
    prompts, answers = _prompts(tree), _answers(tree)
    return prompts if isinstance(answers, Fixed) or isinstance(prompts, Defective) else answers


def _gather(tree: SourceTree) -> FunctionSource:
    found = (tree.function(module, NAME) for module in upstream.LOGPROBS)
    return existing(next(filter(None, found), None), NAME)


def _prompts(tree: SourceTree) -> Verdict:
    gather = _gather(tree)
    if any({PREFILL, NOBODY[1]} <= conjuncts(gather.guards(call)) for call in gather.calls("vals.append")):
        return Fixed("the prompt of who names no tokens is passed over")
    made = [c for c in gather.calls("torch.tensor") if PREFILL in conjuncts(gather.guards(c))]
    expect(len(made) == 1, f"one tensor of the tokens if {PREFILL}", f"{len(made)} such tensors")
    expect_hookable(gather, "logprobs", "token_ids_logprobs_list", "stage", more=True)
    return Defective("of a prompt whose client names no tokens a tensor of none is made")


def _answers(tree: SourceTree) -> Verdict:
    gather = _gather(tree)
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


def get_token_ids_logprobs_raw(
    original: Any, logprobs: Any, named: list[list[int] | None], stage: Any, *args: Any, **kwargs: Any
) -> Any:
    """Of prompts, let who names no tokens name an empty list, and get nothing."""
    if stage.name != "PREFILL" or None not in named or not upstream.is_on():
        return original(logprobs, named, stage, *args, **kwargs)
    values, tokens = original(logprobs, [ids or [] for ids in named], stage, *args, **kwargs)
    for i, ids in enumerate(named):
        if ids is None:
            values[i], tokens[i] = [], []
    return values, tokens


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    parts: list[tuple[Callable[[SourceTree], Verdict], str, Around]] = [
        (_prompts, _gather(tree).target, get_token_ids_logprobs_raw),
        (_answers, f"{upstream.SCHEDULER}:Scheduler.process_batch_result", process_batch_result),
    ]
    return tuple(Hook(target, hook) for judged, target, hook in parts if isinstance(judged(tree), Defective))


OVERLAY = Overlay(
    id="logprob-none",
    symptom="a request with token_ids_logprob beside one without ends the server, with HiSparse or without",
    why=(
        "In a step of decode where somebody names tokens whose logprobs it wants, SGLang makes a tensor for each who "
        "does and a list for the others, and takes all for tensors. The hook makes tensors of the lists before they "
        "are read. To 0.5.15 the same two clients end it when the logprobs of their prompts are wanted, too, and these "
        "are computed together: None is taken for the tokens that are named. The hook puts an empty list there."
    ),
    loses="two clients that decode together, one of whom names tokens with token_ids_logprob, end the server",
    rows=(),
    origin="sgl-project/sglang 0.5.21, which makes a tensor for each",
    remove_when="0.5.21 is the oldest supported release",
    fixed_since="0.5.21",
    probe=judge,
    hooks=hooks,
)
