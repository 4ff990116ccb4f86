"""A batch that leaves staging names its request slots on the CPU too."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, probe

FIELD = "req_pool_indices_cpu"
METHOD = "_build_hisparse_decode_batch"


@probe
def judge(tree: SourceTree) -> Verdict:
    if not tree.mentions(upstream.BATCH, FIELD):
        return Absent(f"batches of this SGLang have no {FIELD}")
    build = existing(upstream.scheduler_method(tree, METHOD), f"Scheduler.{METHOD}")
    sets = build.assigns(f"batch.{FIELD}")
    if sets:
        guards = [guard for node in sets for guard in (*build.guards(node), *build.blocks(node))]
        expect(not guards, f"batch.{FIELD} set unconditionally", " and ".join(guards))
        return Fixed(f"{METHOD} sets {FIELD}")
    expect_hookable(build, "self", "reqs")
    return Defective(f"{METHOD} leaves {FIELD} at None, and every decode step indexes it")


def build_decode_batch(original: Any, scheduler: Any, reqs: Any) -> Any:
    import torch

    batch = original(scheduler, reqs)
    batch.req_pool_indices_cpu = torch.tensor([upstream.slot(req) for req in reqs], dtype=torch.int64)
    return batch


OVERLAY = Overlay(
    id="staged-batch",
    symptom="the first request that decodes ends the server: 'NoneType' object is not subscriptable",
    why=(
        "A batch carries its request slots twice, on the device and on the CPU. The batch that takes requests from "
        "staging to decode is built by hand and has them on the device only; the decode step looks lengths up by the "
        "others. The hook fills them in from the requests, without a copy from the device."
    ),
    loses="no request is ever answered with more than one token",
    rows=(),
    origin="not reported upstream; sgl-project/sglang 0.5.14 sets the field",
    remove_when="0.5.14 is the oldest supported release",
    fixed_since="0.5.14",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", build_decode_batch),),
)
