"""The demo's claims where one server prefills and another, with HiSparse, decodes."""

from __future__ import annotations

import threading

from .. import installation
from ..overlays import late_transfer
from . import checks, load, manners, pd_events, pd_probe, pd_transport, plan, walks
from .pd_servers import Pair
from .report import Report, make
from .setup import Launcher
from .walks import Prompt, Walk

LOAD_SECONDS = 15.0
TRIES = 100  #: of a request that is retracted each time
RETRACT = "pd-retract"  #: the overlay that lets a decode server live through a retraction
LATE = late_transfer.OVERLAY.id  #: the overlay that keeps slots until nobody writes to them any more


def run(launcher: Launcher) -> Report:
    """Every check on one release."""
    report = Report(launcher.target.name)
    make(report, [("prefill and decode on two servers", lambda: _apart(launcher, report))])
    return report


def _apart(launcher: Launcher, report: Report) -> None:
    carrier = pd_transport.find(launcher)
    name = "Mooncake brings the KV from server to server, by TCP over loopback"
    without = f"it does not run here: {carrier.detail}. SGLang's `fake` backend serves instead, which brings no KV"
    report.add(name, True if carrier.carries else None, carrier.detail if carrier.carries else without)
    with Pair(launcher, carrier, skip=f"{LATE},{RETRACT}").running() as pair:
        launcher.progress("without the overlays")
        _without_the_overlays(launcher, report, pair)
        launcher.progress("a new decode server")
        pair.restart_decode()
        plan.plugin_active(launcher, report, pair.decode)
        if carrier.carries:
            _all(launcher, report, pair)
        else:
            _without_kv(launcher, report, pair)


def _without_the_overlays(launcher: Launcher, report: Report, pair: Pair) -> None:
    """The first decode server serves, and ends by itself with requests running; the prefill server stays."""
    if pair.transport.carries:
        _walks(launcher, report, pair, "walks are exact")
    name = f"control: without {LATE}, KV that comes late for an aborted request breaks another's walk"
    if pair.transport.carries and plan.called_for(launcher, report, LATE, name):
        told = _prefills_are_told(launcher)
        late = pd_events.comes_late(pair, launcher.scale, told)
        report.add(name, None if told and late.unsent else late.other.break_at is not None, str(late))
    name = f"control: without {RETRACT}, a retraction ends the decode server"
    if plan.called_for(launcher, report, RETRACT, name):
        answers = walks.together(pair.decode, walks.crowd(launcher.scale, launcher.scale.slots))
        report.add(name, *checks.damage(pair.decode, answers))
        report.add("its clients are told", all(walk.error or walk.exact for walk in answers), str(answers[-1]))


def _all(launcher: Launcher, report: Report, pair: Pair) -> None:
    scale, progress = launcher.scale, launcher.progress
    progress("long walks")
    _walks(launcher, report, pair, "a new decode server with the old prefill server: walks are exact")
    for layer in range(scale.dims.layers):
        progress(f"a wrong row in layer {layer}")
        for where, fault in (("sent", pd_probe.sent_id), ("in the decode server's host pool", pd_probe.kept_id)):
            tokens, step, position, source = checks.wrong_row(scale, layer)
            walk = walks.ask(pair.decode, tokens, step + 8, rid=fault(layer, position, source))
            name = f"control: one wrong row {where}, layer {layer}, breaks the walk where it is needed"
            report.add(name, walk.break_at == step, f"row {position}, needed at step {step}: {walk}")
    progress("forced retractions")
    answers = _retracted(report, pair, walks.crowd(scale, scale.crowd_size))
    name = f"{scale.crowd_size} requests at once on {scale.slots} slots, sent again when retracted: all exact"
    checks.all_exact(report, name, answers)
    progress("aborts")
    pd_events.aborted_while_waiting(report, pair, scale, lambda: _under_load(launcher, report, pair))
    progress("KV for a request that is gone")
    told = _prefills_are_told(launcher)
    late = pd_events.comes_late(pair, scale, told)
    name = "KV that comes late for an aborted request harms no other"
    if told and late.unsent:
        report.add(name, None, str(late))
    elif late.other.exact or late.seconds < late_transfer.PATIENCE:
        report.add(name, late.other.exact and late.meanwhile, str(late))
    else:
        report.add(name, None, f"too late, on this slow machine, to be waited for: {late}")
    report.add("and that request is answered as aborted", late.gone == "aborted", late.gone)
    pd_events.balance(report, pair, "after that")
    lost = pair.prefills.unanswered
    name = "the prefill server answers all that it is asked"
    report.add(name, not lost, "; ".join(lost[:3]) or f"{pair.prefills.answered} answers")
    progress("the prefill server is ended and started anew")
    pd_events.prefill_restarted(report, pair, scale)
    pd_events.balance(report, pair, "at the end")


def _prefills_are_told(launcher: Launcher) -> bool:
    """Of aborts, by the decode server; from 0.5.13. What they have not begun to send they never send then."""
    tree = installation.find(launcher.target.root).tree
    return tree.mentions("sglang.srt.disaggregation.common.conn", "ABORT")


def _walks(launcher: Launcher, report: Report, pair: Pair, name: str) -> None:
    scale = launcher.scale
    alone = [walks.ask(pair.decode, *each) for each in walks.long(scale)]
    checks.all_exact(report, f"{name}, {walks.contexts(scale)}", alone)


def _without_kv(launcher: Launcher, report: Report, pair: Pair) -> None:
    """What can be seen of a decode server that no KV comes for: that it answers, gives everything back, and lives."""
    launcher.progress("forced retractions")
    answers = _retracted(report, pair, walks.crowd(launcher.scale, launcher.scale.crowd_size))
    short = [str(walk) for walk in answers if walk.got is None or len(walk.got) != len(walk.right)]
    report.add("every request gets as many tokens as it asked for", not short, "; ".join(short[:3]))
    checks.pools_balance(report, pair.decode, "decode server: pools are balanced at the end")


def _retracted(report: Report, pair: Pair, prompts: list[Prompt]) -> list[Walk]:
    """All at once, each until it is not told to come again, `TRIES` times at most."""
    before, again, lock = checks.retractions(pair.decode), 0, threading.Lock()

    def ask(prompt: Prompt) -> Walk:
        nonlocal again
        for _ in range(TRIES):
            request = pair.request(*prompt)
            reply = walks.reply(request.generate)
            if not manners.RETRACTED.search(reply.error):
                break
            with lock:
                again += 1
        return walks.of(request, reply)

    with pair.threads(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    retracted = checks.retractions(pair.decode) - before
    report.add(
        "retractions on the decode server: it lives, each request goes on or is told to come again",
        pair.decode.alive and retracted > 0 and again <= retracted,
        f"{retracted} retractions: {again} told to come again, {retracted - again} with their KV computed again",
    )
    return answers


def _under_load(launcher: Launcher, report: Report, pair: Pair) -> None:
    tally = load.drive(pair.decode, launcher.scale, LOAD_SECONDS, 0, launcher.progress)
    report.add(
        "clients that abort or leave at any time: each answered once, every walk exact as far as it went",
        not tally.failures() and tally.all_kinds(),
        tally.summary(),
    )
    report.figures |= tally.figures()
