"""Speculative decoding with HiSparse: what SGLang or the plugin would refuse; judged with the launch command."""

from __future__ import annotations

from collections.abc import Iterator

from ...sizing import formulas, shapes
from ...speculative import limits
from ..examine import Examined
from ..finding import Finding, error
from ..launch import Launch
from ..sizes import sizes
from . import overlays

#: Requests at once that SGLang takes when it speculates and is told no number.
DEFAULT_REQUESTS = 48


def judge(examined: Examined) -> Iterator[Finding]:
    launch, sglang = examined.subject.launch, examined.facts("sglang")
    if not launch.get("speculative_algorithm") or not launch.get("hisparse"):
        return
    if not sglang or sglang["speculative"]:  # as validate_hisparse of SGLang 0.5.22
        if (launch.get("speculative_eagle_topk") or 1) != 1:
            yield error("HiSparse speculates along one line only", "give --speculative-eagle-topk 1")
        return
    if not by_plugin(examined):
        yield error(
            f"SGLang {sglang['version']} has no speculative decoding with HiSparse: the draft worker dies at start",
            "drop --speculative-algorithm, or use SGLang 0.5.22 or later",
        )
        return
    yield from _judge_arguments(examined)
    yield from _judge_pools(examined)


def by_plugin(examined: Examined) -> bool:
    """Whether it speculates, and the plugin makes that possible."""
    sglang, asked = examined.facts("sglang"), examined.subject.launch.get("speculative_algorithm")
    return bool(asked and sglang and not sglang["speculative"] and overlays.applied(examined, "speculative"))


def _judge_arguments(examined: Examined) -> Iterator[Finding]:
    """What the plugin refuses before weights are loaded."""
    launch = examined.subject.launch
    for name, (allowed, remedy) in limits.ARGUMENTS.items():
        value = launch.get(name)
        if value is not None and value not in allowed:
            flag = Launch(options={name: value}).spelled()
            yield error(f"HiSparse with speculative decoding is refused with {flag}", remedy)
    for name in limits.FUSED_TOP_K:
        if launch.environment.get(name, "1").lower() in ("0", "false", "no"):
            yield error(f"HiSparse with speculative decoding is refused: {name} is off", "unset it")


def _judge_pools(examined: Examined) -> Iterator[Finding]:
    """What the plugin refuses when the pools are built, after weights were loaded."""
    launch, size = examined.subject.launch, sizes(examined)
    if size is None:
        return
    server, ranks = size.server, launch.count("dp") if launch.get("dp_attention") else 1
    try:
        formulas.check(server)
    except shapes.SizingError:
        return  # too many draft tokens for the hot buffer; said with the sizes
    if server.draft_tokens > server.hisparse.page_size - 1:
        yield error(
            f"{server.draft_tokens} draft tokens do not fit the extra page of a request's buffer",
            f"give --speculative-num-draft-tokens {server.hisparse.page_size - 1} or less",
        )
    given = launch.get("max_running_requests")
    requests = max(1, (given or DEFAULT_REQUESTS) // ranks)
    buffer, fit = server.hisparse.padded_buffer, server.device_tokens // server.hisparse.padded_buffer
    if requests > fit:
        how = f"--max-running-requests {given}" if given else f"without --max-running-requests SGLang takes {requests};"
        yield error(
            f"{how} with speculative decoding is refused: each of {requests} requests of a rank has a whole buffer of "
            f"{buffer} slots from its first step on, and the device pool has {server.device_tokens} ({size.basis})",
            (f"give --max-running-requests {fit * ranks}, or " if fit else "")
            + "lower device_buffer_size, or give the pool more memory",
        )
