"""A request that leaves staging takes its images along, by which a multimodal model counts positions."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

METHOD = "_build_hisparse_decode_batch"
FIELD = "batch.multimodal_inputs"


@probe
def judge(tree: SourceTree) -> Verdict:
    build = existing(upstream.scheduler_method(tree, METHOD), f"Scheduler.{METHOD}")
    sets = build.assigns(FIELD)
    if sets:
        guards = [guard for node in sets for guard in (*build.guards(node), *build.blocks(node))]
        expect(not guards, f"{FIELD} set unconditionally", " and ".join(guards))
        return Fixed(f"{METHOD} sets {FIELD}")
    expect_hookable(build, "self", "reqs")
    return Defective(f"{METHOD} leaves {FIELD} at None")


def build_decode_batch(original: Any, scheduler: Any, reqs: Any) -> Any:
    batch = original(scheduler, reqs)
    batch.multimodal_inputs = [req.multimodal_inputs for req in reqs]
    return batch


OVERLAY = Overlay(
    id="multimodal-batch",
    symptom="a multimodal model with mrope ends the server at the first token it decodes, with or without an image",
    why=(
        "For a model with multimodal rotary positions every decode step looks the images of each request up in the "
        "batch, where None stands for a request without. The batch that takes requests from staging to decode is built "
        "by hand and has no such list. The hook puts in what each request has, as SGLang does without HiSparse."
    ),
    loses="models with multimodal rotary positions (mrope) do not decode",
    rows=(),
    origin="not reported upstream",
    remove_when="the oldest supported release sets multimodal_inputs",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", build_decode_batch),),
)
