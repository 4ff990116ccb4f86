"""On a PD decode worker, KV that cannot be computed again as it was is not computed again otherwise."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from . import retry_later
from .probing import existing, expect, expect_hookable, looks_at, probe

HOLD, PAYLOAD = "DecodePreallocQueue.hold_rebootstrap", "Req.build_rebootstrap_payload"
#: Where a request has what its KV took besides tokens: its LoRA adapter, its images.
BESIDES = ("lora_id", "multimodal_inputs")
#: What a prefill server is told them by.
FIELDS = {"lora_path", "lora_id", "image_data", "audio_data", "video_data"}
MESSAGE = "A pause took this request's KV, which cannot be computed again with its LoRA adapter or images. Retry later."


@probe
def judge(tree: SourceTree) -> Verdict:
    hold = tree.function(upstream.DECODE, HOLD)
    if hold is None:
        return Absent("a pause has no KV computed again")
    if all(looks_at(hold, name) for name in BESIDES):
        return Fixed(f"{HOLD} looks at {' and '.join(BESIDES)}")
    payload = existing(tree.function(upstream.BATCH, PAYLOAD), PAYLOAD)
    dicts = [node for node in ast.walk(payload.node) if isinstance(node, ast.Dict)]
    keys = {str(key.value) for node in dicts for key in node.keys if isinstance(key, ast.Constant)}
    expect("input_ids" in keys and not keys & FIELDS, "input_ids and neither adapter nor images", f"{sorted(keys)}")
    expect_hookable(hold, "self", "req")
    return Defective(f"{PAYLOAD} has token ids only, and a pause asks by it for everybody's KV")


def hold_rebootstrap(original: Any, queue: Any, req: Any) -> Any:
    """Answer whose KV took more than tokens; the pause has freed what they held."""
    if queue.scheduler.hisparse_coordinator is None or all(getattr(req, name) is None for name in BESIDES):
        return original(queue, req)
    retry_later.answer(queue.scheduler, req, MESSAGE)
    return None


OVERLAY = Overlay(
    id="rebootstrap-adapter",
    symptom="with PD disaggregation, a request with a LoRA adapter or images goes on after a pause with wrong KV",
    why=(
        "A pause that retracts takes the KV of a decode worker's requests, and has it computed again by their prefill "
        "worker when it ends. What asks for that has token ids and sampling parameters, and no word of an adapter or "
        "of images: the KV comes back as that of the bare model and of placeholders, and the rest of the answer is "
        "silently wrong. After a retraction SGLang itself answers a request with images by 503. The hook does so with "
        "both after a pause."
    ),
    loses="with PD disaggregation, answers that a pause interrupts go on without their LoRA adapter and images",
    rows=("pd-retract",),
    origin="not reported upstream",
    remove_when="what asks for KV again names the adapter and the images in the oldest supported release",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.DECODE}:{HOLD}", hold_rebootstrap),),
)
