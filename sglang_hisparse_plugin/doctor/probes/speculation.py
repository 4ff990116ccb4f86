"""Speculative decoding with HiSparse: what SGLang or the plugin would refuse; judged with the launch command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...sizing import formulas, shapes
from ...speculative import limits
from ...speculative.problem import Problem
from ..examine import Examined
from ..finding import Finding, error
from ..sizes import architecture, sizes
from . import overlays

#: Requests at once that SGLang takes when it speculates and is told no number.
DEFAULT_REQUESTS = 48


def judge(examined: Examined) -> Iterator[Finding]:
    launch, sglang = examined.subject.launch, examined.facts("sglang")
    if not launch.get("hisparse") or not limits.asked(launch.arguments):
        return
    if not sglang or sglang["speculative"]:
        names = [architecture(examined)]
        yield from _refused(
            [*limits.of_sglang(launch.arguments), *limits.model(launch.arguments, names, finds_v32=True)]
        )
        return
    if not by_plugin(examined):
        yield error(f"SGLang {sglang['version']}: {limits.NOT_HERE.what}", limits.NOT_HERE.remedy)
        return
    yield from _refused(limits.arguments(launch.arguments, launch.environment))
    finds = limits.V32 in sglang.get("draft_architectures", [limits.V32])
    yield from _refused(limits.model(launch.arguments, [architecture(examined)], finds_v32=finds))
    yield from _judge_pools(examined)


def _refused(problems: Iterable[Problem]) -> Iterator[Finding]:
    """What the plugin refuses before weights are loaded."""
    for problem in problems:
        yield error(f"{limits.PREFIX}refused, for {problem.what}", problem.remedy)


def by_plugin(examined: Examined) -> bool:
    """Whether it speculates, and the plugin makes that possible."""
    sglang, asked = examined.facts("sglang"), limits.asked(examined.subject.launch.arguments)
    return bool(asked and sglang and not sglang["speculative"] and overlays.applied(examined, "speculative"))


def _judge_pools(examined: Examined) -> Iterator[Finding]:
    """What the plugin refuses when the pools are built, after weights were loaded."""
    launch, size = examined.subject.launch, sizes(examined)
    if size is None:
        return
    server, ranks = size.server, launch.attention_ranks
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
