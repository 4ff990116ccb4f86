"""A request dropped for a wrong KV checksum gives its slots back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect_free, expect_hookable, probe, tells

METHOD = "_handle_kv_checksum_mismatch"
#: SGLang's own tests stop at a mismatch; 0.5.23 makes an exception of those that provoke one.
IN_CI = (
    {"not is_in_ci()"},
    {"not (is_in_ci() and envs.SGLANG_TEST_DISAGG_KV_CHECKSUM_MISMATCH_PROB.get() == 0)"},
)


@probe
def judge(tree: SourceTree) -> Verdict:
    if tree.has_module(upstream.DECODE) and not tree.mentions(upstream.DECODE, "disaggregation_enable_kv_checksum"):
        return Absent("this SGLang has no KV checksums")
    drop = existing(upstream.decode_method(tree, METHOD), METHOD)
    free = expect_free(drop, [set(), *IN_CI])
    if tells(tree, drop, "request_finished", free):
        return Fixed(f"{METHOD} tells the coordinator first")
    expect_hookable(drop, "self", "req", more=True)
    return Defective(f"{METHOD} frees the request and never tells the coordinator")


def handle_kv_checksum_mismatch(original: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the coordinator while it can still find the request's rows."""
    if scheduler.hisparse_coordinator is not None:
        scheduler.hisparse_coordinator.request_finished(req)
    return original(scheduler, req, *args, **kwargs)


OVERLAY = Overlay(
    id="checksum-drop",
    symptom="with PD disaggregation, a request dropped for a wrong KV checksum leaks its hot buffer and host slots",
    why=(
        "The request was admitted with its KV in the host pool and has a hot buffer. Only its logical slots are "
        "released. The hook tells the coordinator first, as every other end of a transferred request does."
    ),
    loses="with --disaggregation-enable-kv-checksum every mismatch leaks a hot buffer and host slots",
    rows=("quick-finish",),
    origin="not reported upstream; the checksums came with 0.5.21",
    remove_when="_handle_kv_checksum_mismatch calls request_finished in the oldest supported release that has it",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.DECODE}:SchedulerDisaggregationDecodeMixin.{METHOD}", handle_kv_checksum_mismatch),
    ),
)
