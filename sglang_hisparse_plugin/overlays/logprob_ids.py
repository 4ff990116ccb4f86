"""A request that leaves staging gets the logprobs of the tokens it asked for, not of its prompt."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

METHOD = "_build_hisparse_decode_batch"
FIELD = "batch.token_ids_logprobs"
RIGHT = {f"[r.{way}token_ids_logprob for r in reqs]" for way in ("", "logprob.")}


@probe
def judge(tree: SourceTree) -> Verdict:
    build = existing(upstream.scheduler_method(tree, METHOD), f"Scheduler.{METHOD}")
    sets = build.assigns(FIELD)
    expect(len(sets) == 1, f"one assignment to {FIELD} in {METHOD}", f"{len(sets)}")
    guards, value = build.guards(sets[0]), ast.unparse(sets[0].value)
    expect(guards == ["batch.return_logprob"], f"{FIELD} set if batch.return_logprob", " and ".join(guards))
    if value in RIGHT:
        return Fixed(f"{FIELD} is what each request asked for")
    expect("r.origin_input_ids" in value, f"{FIELD} to be of r.token_ids_logprob or r.origin_input_ids", value)
    expect_hookable(build, "self", "reqs")
    return Defective(f"{FIELD} is the prompt of each request")


def build_decode_batch(original: Any, scheduler: Any, reqs: Any) -> Any:
    batch = original(scheduler, reqs)
    if batch.return_logprob:
        batch.token_ids_logprobs = [upstream.token_ids_logprob(req) for req in reqs]
    return batch


OVERLAY = Overlay(
    id="logprob-ids",
    symptom="a request with return_logprob beside one without ends the server: 'list' object has no attribute 'tolist'",
    why=(
        "The batch that takes requests from staging to decode is built by hand, with the ids of each prompt as those "
        "of which a logprob is wanted in every step. Who named others gets those of its prompt, for each token of its "
        "answer; who named none pays for them; and to 0.5.20 one beside a request that wants no logprobs ends the "
        "scheduler. The hook puts in what each request asked for, as SGLang does without HiSparse."
    ),
    loses="two clients, one of whom asks for logprobs, end the server, and token_ids_logprob answers of other tokens",
    rows=(),
    origin="not reported upstream",
    remove_when="the oldest supported release takes token_ids_logprobs from the requests",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", build_decode_batch),),
)
