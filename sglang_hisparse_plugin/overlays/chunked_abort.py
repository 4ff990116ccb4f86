"""A request aborted in the middle of a chunked prefill gives its speculative workspace back."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..patching.syntax import ends_with
from .probing import existing, expect, expect_free, expect_hookable, probe, tells

METHOD = "process_pending_chunked_abort"


@probe
def judge(tree: SourceTree) -> Verdict:
    found = upstream.scheduler_method(tree, METHOD)
    workspace = upstream.coordinator_method(tree, "allocate_spec_scratch")
    if workspace is None and not tree.mentions(upstream.COORDINATOR, "allocate_spec_scratch"):
        return Absent("in this SGLang a request holds nothing of the coordinator's before its prefill is done")
    abort = existing(found, METHOD)
    free = expect_free(abort, [{"req is not None", "self.chunked_req is req"}])
    if tells(tree, abort, "request_finished", free):
        return Fixed(f"{METHOD} tells the coordinator first")
    expect_hookable(abort, "self")
    taken = abort.assigns("req")
    expect(
        len(taken) == 1 and ends_with(taken[0].value, "self._pending_chunked_abort_req"),
        "req = self._pending_chunked_abort_req",
        "another source of req",
    )
    return Defective(f"{METHOD} frees the request and never tells the coordinator")


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
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.{METHOD}", process_pending_chunked_abort),),
)
