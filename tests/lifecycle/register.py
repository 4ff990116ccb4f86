"""What each scenario shows on an unchanged release: nothing, or the evidence of a defect."""

from __future__ import annotations

import os

RELEASES = ("0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.13", "0.5.15", "0.5.18", "0.5.20", "0.5.23")
"""The plugin is played on all of these."""

ALL_ASKED = bool(os.environ.get("EVERY_RELEASE"))
SHOWN = RELEASES if ALL_ASKED else ("0.5.10.post1", "0.5.11", "0.5.12", "0.5.23")
"""Where unchanged releases show their defects."""
PLAYED = RELEASES if ALL_ASKED else ("0.5.10.post1", "0.5.23")
"""Where the state machine plays. `make every-release` takes all for both."""

CONTROL = {"corrupted-row": "attention read wrong rows"}
"""Evidence that must appear in every variant: a check that cannot fail is worth nothing."""

ONLY_IN = {
    "mixed-chunks": RELEASES[:-1],
    **dict.fromkeys(("abort-during-pause", "adapter-during-pause"), ("0.5.18", "0.5.20", "0.5.23")),
    **dict.fromkeys(("checksum-mismatch", "chunked-abort"), ("0.5.23",)),
    **dict.fromkeys(("drafts-device-full", "drafts-host-full", "drafts-take-no-device"), ("0.5.23",)),
}
"""Scenarios about things that only these releases have."""

UNSERVED = ("0.5.13",)
"""Releases that, unchanged, end with the first request that decodes; only `plain` is judged on them."""

HOST_LEAK, DEVICE_LEAK = "host rows in no hand", "device pages in no hand"
TO_LIST = "has no attribute 'tolist'"
DECODED = "the aborted request was decoded"


def _span(first: str, last: str) -> tuple[str, ...]:
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


OLD, ALL = _span("0.5.10", "0.5.10.post1"), RELEASES

DEFECTS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "plain": ((UNSERVED, "NoneType"),),
    "more-than-slots": ((("0.5.11",), "alloc_req_slots"),),  # before, a batch that stays full hides it
    "retract-decode": ((OLD, "retract_req (hisparse_coordinator.py"),),
    "last-request": ((OLD, HOST_LEAK),),
    "preempt": ((OLD, HOST_LEAK),),
    "readmit": ((OLD, HOST_LEAK),),
    "pause-decoding": ((OLD, HOST_LEAK),),
    "pause-prefilled": ((_span("0.5.10", "0.5.15"), HOST_LEAK),),
    "pause-staged": ((OLD, HOST_LEAK), (_span("0.5.11", "0.5.23"), "staged is still going on")),
    "pause-chunked": ((OLD, HOST_LEAK), (_span("0.5.11", "0.5.20"), DEVICE_LEAK)),
    "one-token-each": ((OLD, "what was waited for did not come"),),
    "refused-while-staging": ((OLD, "there is room, and the prompt still waits"),),
    "flush-while-staging": ((OLD, "the cache was flushed under a request that is staging"),),
    "finished-release": ((("0.5.11",), "the coordinator failed"),),
    "quick-finish": ((OLD, HOST_LEAK),),
    "direct-flag": ((_span("0.5.10", "0.5.11"), "still taken for staging"),),
    "checksum-mismatch": ((("0.5.23",), HOST_LEAK),),
    "chunked-abort": ((("0.5.23",), DEVICE_LEAK),),
    "pipeline-stage": ((ALL, "index 30 is out of bounds"),),
    "stages-agree": ((ALL, "the other stages do not"),),
    "host-full": ((ALL, "host mem pool alloc failed"),),
    "host-full-alone": ((ALL, "host mem pool alloc failed"),),
    "host-full-staged": ((ALL, "host mem pool alloc failed"),),
    "device-full": ((ALL, "_grow_device_buffers failed"),),
    "host-full-at-staging": ((ALL, "host mem pool alloc failed"),),
    "device-full-after-staging": ((ALL, "Hisparse allocation failed in alloc_device_buffer"),),
    "last-pages": ((OLD, "Prefill out of memory"),),
    "host-small": ((ALL, "host mem pool alloc failed"),),
    "never-fits": ((ALL, "host mem pool alloc failed"),),
    "long-answer": ((ALL, "what was waited for did not come"),),
    "long-request": ((ALL, "the answer was cut off"),),
    "device-full-for-nothing": ((OLD, "retract_req (hisparse_coordinator.py"), (ALL, "though it needed nothing")),
    "drafts-device-full": ((ALL, "Hisparse allocation failed in alloc_device_buffer"),),
    "drafts-host-full": ((ALL, "host mem pool alloc failed"),),
    "drafts-take-no-device": ((ALL, "though it needed nothing"),),
    "mixed-chunks": ((_span("0.5.10", "0.5.20"), "> merge_batch (schedule_batch.py"),),
    "abort-waiting-transferred": ((_span("0.5.12", "0.5.20"), HOST_LEAK),),
    "pause-transferred": ((_span("0.5.10", "0.5.15"), "> get_cpu_copy ("),),
    "retract-transferred": ((ALL, "> get_cpu_copy ("),),
    "retract-waiting-transferred": ((_span("0.5.10", "0.5.15"), "> get_cpu_copy ("), (ALL, "does not go on")),
    "last-beside-transfer": ((_span("0.5.10", "0.5.15"), "> get_cpu_copy ("), (ALL, "not 503 once")),
    "abort-during-pause": ((_span("0.5.18", "0.5.23"), "not as aborted once"),),
    "adapter-during-pause": ((_span("0.5.18", "0.5.23"), "from its tokens alone"),),
    "abort-staged": ((ALL, DECODED),),
    "abort-transferred": ((ALL, DECODED),),
    "abort-everything": ((ALL, "gone ended as [], not as aborted once"),),
    "abort-slow-transfer": ((ALL, DECODED),),
    "logprobs-beside-none": ((_span("0.5.10", "0.5.20"), TO_LIST),),
    "named-beside-none": ((_span("0.5.10", "0.5.20"), TO_LIST), (("0.5.23",), "logprobs of the ids")),
    "prompts-beside-none": (
        (_span("0.5.10", "0.5.15"), "cannot be interpreted as an integer"),
        (_span("0.5.18", "0.5.20"), TO_LIST),
        (("0.5.23",), "logprobs of the ids"),
    ),
    "names-tokens": ((ALL, "logprobs of the ids"),),
    "joins-as-prefilled": ((ALL, "token_ids_logprobs is"),),
    "mrope-positions": ((ALL, "'NoneType' object is not"),),
    "step-without-waiting": ((OLD, "a step waits for the forward pass: tensor"),),
}


WITH_OVERLAP: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "preempt": ((("0.5.11",), "alloc_req_slots"),),
    "one-token-each": ((("0.5.11",), "alloc_req_slots"),),
}
"""What shows only with overlap, where requests that have ended hold their slots for one iteration more."""


OPEN: dict[tuple[str, str], str] = {}
"""What shows with the plugin, too, by release and scenario."""


def evidence(release: str, mode: str, scenario: str) -> str:
    """What must be found when nothing is patched; empty if nothing may be."""
    shown = [*DEFECTS.get(scenario, ()), *(WITH_OVERLAP.get(scenario, ()) if mode == "overlap" else ())]
    return next((text for releases, text in shown if release in releases), "")
