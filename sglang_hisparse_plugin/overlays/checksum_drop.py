"""A request dropped for a wrong KV checksum gives its slots back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import expect, expect_parameters, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    drop = upstream.decode_method(tree, "_handle_kv_checksum_mismatch")
    if drop is None:
        return Absent("this SGLang has no KV checksums")
    frees = drop.calls("release_kv_cache")
    expect(len(frees) == 1 and not drop.guards(frees[0]), "one unconditional release_kv_cache", f"{len(frees)}")
    tells = drop.calls("request_finished")
    if not tells:
        expect_parameters(drop, "self", "req")
        return Defective("_handle_kv_checksum_mismatch frees the request and never tells the coordinator")
    expect(
        len(tells) == 1 and tells[0].lineno < frees[0].lineno,
        "request_finished before release_kv_cache",
        "another order",
    )
    return Fixed("_handle_kv_checksum_mismatch tells the coordinator first")


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
        Hook(
            f"{upstream.DECODE}:SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch",
            handle_kv_checksum_mismatch,
        ),
    ),
)
