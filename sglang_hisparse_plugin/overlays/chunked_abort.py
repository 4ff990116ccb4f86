"""A request aborted in the middle of a chunked prefill gives its speculative workspace back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree, ends_with
from .probing import expect, expect_parameters, probe


@probe
def judge(tree: SourceTree) -> Verdict:
    abort = upstream.scheduler_method(tree, "process_pending_chunked_abort")
    if abort is None or upstream.coordinator_method(tree, "allocate_spec_scratch") is None:
        return Absent("in this SGLang a request holds nothing of the coordinator's before its prefill is done")
    frees = abort.calls("release_kv_cache")
    expect(len(frees) == 1 and not abort.guards(frees[0]), "one unconditional release_kv_cache", f"{len(frees)}")
    tells = abort.calls("request_finished")
    if not tells:
        expect_parameters(abort, "self")
        taken = abort.assigns("req")
        expect(
            len(taken) == 1 and ends_with(taken[0].value, "self._pending_chunked_abort_req"),
            "req = self._pending_chunked_abort_req",
            "another source of req",
        )
        return Defective("process_pending_chunked_abort frees the request and never tells the coordinator")
    expect(
        len(tells) == 1 and tells[0].lineno < frees[0].lineno,
        "request_finished before release_kv_cache",
        "another order",
    )
    return Fixed("process_pending_chunked_abort tells the coordinator first")


def process_pending_chunked_abort(original: Any, scheduler: Any) -> Any:
    """Tell the coordinator if the original is about to free the request."""
    req = scheduler._pending_chunked_abort_req
    if scheduler.hisparse_coordinator is not None and req is not None and scheduler.chunked_req is req:
        scheduler.hisparse_coordinator.request_finished(req)
    return original(scheduler)


OVERLAY = Overlay(
    id="chunked-abort",
    symptom="with speculative decoding, a request aborted in the middle of its prefill keeps its swap workspace",
    why=(
        "From 0.5.22 a request gets its speculative workspace, scratch slots of the device pool, with its slot. "
        "An abort between two chunks releases its KV but not that. The hook tells the coordinator first."
    ),
    loses="with speculative decoding, aborts during a chunked prefill leak device slots",
    rows=("other-releasers",),
    origin="not reported upstream; the workspace came with 0.5.22",
    remove_when="process_pending_chunked_abort calls request_finished in the oldest supported release that has it",
    probe=judge,
    hooks=lambda tree: (
        Hook(f"{upstream.SCHEDULER}:Scheduler.process_pending_chunked_abort", process_pending_chunked_abort),
    ),
)
