"""The demo's claims under speculative decoding: the same walks, faster by as many tokens as drafts are accepted."""

from __future__ import annotations

import functools

from ..patching.outcome import Applied, Refused, Skipped
from ..speculative import limits, room
from . import checks, plan, walks
from .report import Part, Report, make
from .server import Server, ServerFailed
from .setup import Launcher
from .side_by_side import SideBySide, Up
from .walks import Walk
from .weights import Draft

OVERLAY = "speculative"  #: the overlay that makes HiSparse serve speculative decoding
GUARD = "speculative-guard"  #: the one that ends a server where none does
COLD = 0.01  #: a temperature: drafts are verified by sampling, and only the right token is ever likely
NEARLY = 0.9  #: of the most tokens a verification can give, where every draft is right
WITHOUT, WITH = "without HiSparse", "with HiSparse"
REFUSED = "nothing serves both on this release, and a server that is asked to says so and ends"
CONTROL = "control: with the plugin off, a server with both does not serve"


def run(launcher: Launcher, quick: bool = False) -> Report:
    """Every check on one release.

    Args:
        quick: only the server whose drafts are half wrong, in which every path is taken; for many variants in turn.
    """
    report = Report(launcher.target.name, launcher.progress)
    half = launcher.server("half-wrong", retract=True, draft=Draft.HALF)
    without = launcher.server("right-drafts-without-hisparse", hisparse=False, draft=Draft.RIGHT)
    right = launcher.server("right-drafts-with-hisparse", draft=Draft.RIGHT)
    wrong = launcher.server("wrong-drafts-with-hisparse", draft=Draft.WRONG)
    off = launcher.server("plugin-off", plugin="off", draft=Draft.RIGHT)
    planned = plan.planned(launcher)
    if isinstance(planned.get(GUARD), Applied):
        make(report, [(REFUSED, lambda: _refused(report, half))])
        return report
    refused = planned.get(OVERLAY)
    top_k = launcher.scale.dims.index_topk
    if isinstance(refused, Skipped) and top_k < room.OWN_LEAST_TOP_K:
        why = f"SGLang's own way takes a top-k from {room.OWN_LEAST_TOP_K} on, this model has {top_k}: make speculative"
        report.add("HiSparse serves speculative decoding", False, why)
        return report
    if isinstance(refused, Refused):
        report.add("HiSparse serves speculative decoding", False, f"refused: {refused.evidence}. {refused.reason}")
        later = [without]
    else:
        later = [] if quick else [without, right, wrong, off]
    with SideBySide(later, at_once=launcher.scale.device == "cuda") as servers:
        walk = functools.partial(_long_walks, launcher, report)
        parts: dict[Server, Part] = {
            without: (WITHOUT, lambda: walk(servers.up(without), WITHOUT, Draft.RIGHT)),
            right: (WITH, lambda: walk(servers.up(right), WITH, Draft.RIGHT)),
            wrong: (f"{WITH}, drafts wrong", lambda: walk(servers.up(wrong), WITH, Draft.WRONG)),
            off: (CONTROL, lambda: _without_plugin(launcher, report, off, servers.up(off))),
        }
        first: Part = ("drafts half wrong", lambda: _half_wrong(launcher, report, half, servers))
        start = [] if isinstance(refused, Refused) else [first]
        make(report, [*start, *(parts[server] for server in later)])
    return report


def _refused(report: Report, server: Server) -> None:
    try:
        with server:
            report.add(REFUSED, False, "it started")
    except ServerFailed:
        told = str(limits.NOT_HERE) in server.log_text()
        report.add(REFUSED, told, str(limits.NOT_HERE) if told else f"it ended without: {server.last_exception()}")


def _half_wrong(launcher: Launcher, report: Report, server: Server, others: SideBySide) -> None:
    with server:
        others.begin()  # not before: then they find the kernels that this one had to compile
        alone = checks.with_plugin(launcher, report, server, "half-wrong")
        _sampled(launcher, report, server)
    most, got = launcher.variant.draft_tokens, acceptance(alone)
    name = f"{WITH}, drafts half wrong: some are accepted, some are not"
    _add(report, name, 1.1 < got < NEARLY * most, got, most)


def _sampled(launcher: Launcher, report: Report, server: Server) -> None:
    """Drafts are verified by another kernel where a request has a temperature."""
    name = f"{WITH}, drafts half wrong, sampled at a temperature of {COLD}"
    launcher.progress(f"{name}: long walks")
    answers = [walks.ask(server, *each, temperature=COLD) for each in walks.long(launcher.scale)]
    checks.all_exact(report, f"{name}: walks are exact", answers)
    checks.pools_balance(report, server, f"{name}: pools are balanced at the end")


def _long_walks(launcher: Launcher, report: Report, up: Up, where: str, draft: Draft) -> None:
    """Exact, and nearly every draft accepted, or none."""
    name = f"{where}, drafts {draft.name.lower()}"
    with up as server:
        launcher.progress(f"{name}: long walks")
        alone = [walks.ask(server, *each) for each in walks.long(launcher.scale)]
        checks.pools_balance(report, server, f"{name}: pools are balanced at the end")
    most, got = launcher.variant.draft_tokens, acceptance(alone)
    checks.all_exact(report, f"{name}: walks are exact", alone)
    if draft is Draft.RIGHT:
        _add(report, f"{where}: nearly every draft is accepted", got > NEARLY * most, got, most)
    else:
        _add(report, f"control: {where}, drafts wrong: none is accepted", got == 1, got, most)


def _without_plugin(launcher: Launcher, report: Report, server: Server, up: Up) -> None:
    if not plan.called_for(launcher, report, OVERLAY, CONTROL):
        return
    try:
        with up:
            answers = [walks.ask(server, *each) for each in walks.long(launcher.scale)]
            report.add(CONTROL, *checks.damage(server, answers))
    except ServerFailed:
        last = server.last_exception()
        report.add(CONTROL, bool(last), f"it ends while starting: {last or 'its log does not say why'}")


def acceptance(answers: list[Walk]) -> float:
    """Tokens per verification, the one that the model itself adds included; 0 where nothing was verified."""
    verifications = sum(walk.verifications for walk in answers)
    generated = sum(len(walk.got or [1]) - 1 for walk in answers)  # the first token is the prefill's
    return generated / verifications if verifications else 0.0


def _add(report: Report, name: str, passed: bool, got: float, most: int) -> None:
    report.add(name, passed, f"{got:.2f} tokens per verification, of {most}")
    report.figures[f"acceptance: {name}"] = round(got, 3)
