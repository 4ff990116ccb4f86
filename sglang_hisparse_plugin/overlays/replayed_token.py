"""On a PD decode worker, a token that is held back while its KV is computed again is not streamed twice."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import conjuncts, existing, expect, expect_hookable, expect_no_callee_looks_at, looks_at, probe

STREAMER = "SchedulerOutputStreamer"
HELD = "pd_rebootstrap_forced_output_id"


@probe
def judge(tree: SourceTree) -> Verdict:
    add = existing(tree.function(upstream.DECODE, "DecodePreallocQueue.add"), "DecodePreallocQueue.add")
    if not add.calls("output_ids.pop"):
        return Absent("a retraction takes no token back")
    name = f"{STREAMER}._stream_output_generation"
    generation = existing(tree.function(upstream.STREAMER, name), name)
    skips = [node for node in ast.walk(generation.node) if isinstance(node, ast.Continue)]
    if any(f"req.{HELD} is not None" in conjuncts(generation.guards(skip)) for skip in skips):
        return Fixed(f"{name} leaves out who has a token held back")
    expect(not looks_at(generation, HELD), f"continue if req.{HELD} is not None", f"{HELD} looked at otherwise")
    expect_no_callee_looks_at(tree, generation, HELD, f"at {HELD}")
    stream = existing(tree.function(upstream.STREAMER, f"{STREAMER}.stream_output"), f"{STREAMER}.stream_output")
    expect_hookable(stream, "self", "reqs", "return_logprob", "skip_req")
    return Defective("how many tokens were sent is noted anew while the last of them is held back")


def stream_output(original: Any, streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> Any:
    """Say nothing of who has a token held back, unless it has ended: then with that token."""
    if not streamer.server_args.enable_hisparse:
        return original(streamer, reqs, return_logprob, skip_req)
    for req in reqs:
        if getattr(req, HELD) is not None and req.finished():
            req.output_ids.append(getattr(req, HELD))
            setattr(req, HELD, None)
    return original(streamer, [req for req in reqs if getattr(req, HELD) is None], return_logprob, skip_req)


OVERLAY = Overlay(
    id="replayed-token",
    symptom="with PD disaggregation, a stream repeats a token after a retraction",
    why=(
        "When a request is retracted on a decode worker, its last token is taken back and added again once its KV has "
        "been computed again. With overlap, a step is under way meanwhile. Its result streams the request with one "
        "token less, which is noted as all that was sent; the token goes out again when it is back. The hook leaves "
        "such a request out. One that ends meanwhile gets its token back first, so that its answer counts it."
    ),
    loses="with PD disaggregation, a retraction repeats a token in the client's stream",
    rows=("pd-retract",),
    origin="not reported upstream",
    remove_when="the streamer knows of tokens that are held back in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.STREAMER}:{STREAMER}.stream_output", stream_output),),
)
