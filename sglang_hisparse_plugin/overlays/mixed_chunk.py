"""Prefill chunks and decodes are not mixed in one batch."""

from __future__ import annotations

import ast
import logging
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..patching.syntax import ends_with
from .probing import conjuncts, existing, expect, expect_hookable, probe

METHOD, REFUSAL = "init_chunked_prefill", "validate_hisparse_feature_combos"

logger = logging.getLogger(__name__)


@probe
def judge(tree: SourceTree) -> Verdict:
    refusal = tree.function(upstream.ARGUMENTS_OF_HISPARSE, REFUSAL)
    if refusal is not None:
        raises = [node for node in ast.walk(refusal.node) if isinstance(node, ast.Raise)]
        if any(conjuncts(refusal.guards(node)) == {"cfg.enable_mixed_chunk"} for node in raises):
            return Fixed(f"{REFUSAL} refuses --enable-mixed-chunk")
    init = existing(upstream.scheduler_method(tree, METHOD), f"Scheduler.{METHOD}")
    set_by = [conjuncts([ast.unparse(node.value)]) for node in init.assigns("self.is_mixed_chunk")]
    expect(len(set_by) == 1, "one assignment to self.is_mixed_chunk", f"{len(set_by)}")
    if "not self.enable_hisparse" in set_by[0]:
        return Fixed(f"{METHOD} leaves mixing out with HiSparse")
    flags = [test for test in set_by[0] if ends_with(ast.parse(test, mode="eval").body, "enable_mixed_chunk")]
    others = set_by[0] - {"self.chunked_prefill_size is not None", *flags, "get_schedule().enable_mixed_chunk"}
    expect(not others, "is_mixed_chunk set by --enable-mixed-chunk and the chunk size", " and ".join(sorted(others)))
    expect_hookable(init, "self")
    return Defective("requests that decode are mixed into prefill batches, from where HiSparse does not take them back")


def init_chunked_prefill(original: Any, scheduler: Any) -> Any:
    """Chunks and decodes take turns, as without the flag."""
    result = original(scheduler)
    if scheduler.enable_hisparse and scheduler.is_mixed_chunk:
        scheduler.is_mixed_chunk = False
        logger.warning("HiSparse overlay mixed-chunk: --enable-mixed-chunk is left out of account, HiSparse cannot mix")
    return result


OVERLAY = Overlay(
    id="mixed-chunk",
    symptom="with --enable-mixed-chunk, a prompt that arrives while others decode ends the server",
    why=(
        "A mixed batch takes the requests that decode into a prefill batch. Their batch, which came out of staging, "
        "lacks what is merged there. Were it merged, attention would read pages that HiSparse has given up, and the "
        "requests would not come back, for a prefill batch is not merged into the running one. From 0.5.22 SGLang "
        "refuses the flag. The hook leaves it out of account, with a warning: chunks and decodes take turns."
    ),
    loses="--enable-mixed-chunk ends the server",
    rows=("mixed-chunk",),
    origin="sgl-project/sglang 0.5.22, which refuses the flag",
    remove_when="0.5.22 is the oldest supported release",
    fixed_since="0.5.22",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", init_chunked_prefill),),
)
