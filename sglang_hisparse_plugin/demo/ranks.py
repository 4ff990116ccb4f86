"""The demo's claims under tensor parallelism: what ranks must do alike, and what only they can do differently."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from . import checks, language, plan, probe, walks
from .client import Client
from .report import Part, Report, make
from .scales import Scale
from .server import Server
from .setup import Launcher
from .side_by_side import SideBySide, Up
from .walks import Walk

OVERLAY = "tp-ready"  #: the overlay that lets a rank vote whose staging queue is empty
TURNS = 5  #: iterations by which a request comes later to one rank
STEPS = 16  #: tokens of such a request
PATIENCE = 20  #: seconds, at least, in which a server that does not hang answers it
MANY = 5  #: times as long as it took where no rank hangs
WITHOUT, WITH = "without HiSparse", "with HiSparse and the plugin"
CONTROL = f"control: without {OVERLAY}, a request that comes later to one rank is never answered"


def run(launcher: Launcher) -> Report:
    """Every check on one release."""
    report = Report(launcher.target.name, launcher.progress)
    without = launcher.server("without-hisparse", hisparse=False)
    with_plugin = launcher.server("plugin-on", retract=True)
    control = launcher.server(f"without-{OVERLAY}", skip=OVERLAY)
    with SideBySide([without, with_plugin, control], at_once=launcher.scale.device == "cuda") as servers:
        servers.begin()
        took: list[float] = []
        parts: list[Part] = [
            (WITHOUT, lambda: without_hisparse(launcher, report, servers.up(without))),
            (WITH, lambda: took.append(_with_plugin(launcher, report, servers.up(with_plugin)))),
            (CONTROL, lambda: _without_the_overlay(launcher, report, servers.up(control), MANY * max(took, default=0))),
        ]
        make(report, parts)
    return report


def without_hisparse(launcher: Launcher, report: Report, up: Up) -> None:
    """What the walks are compared with: that this SGLang makes them on these ranks."""
    with up as server:
        launcher.progress("without-hisparse: long walks")
        answers = [walks.ask(server, *each) for each in walks.long(launcher.scale)]
        checks.all_exact(report, "walks are exact without HiSparse", answers)
        checks.pools_balance(report, server, "without HiSparse: pools of every rank are balanced at the end")


def _with_plugin(launcher: Launcher, report: Report, up: Up) -> float:
    """Returns the seconds that requests took which come later to one rank."""
    with up as server:
        checks.with_plugin(launcher, report, server, "plugin-on")
        start = time.monotonic()
        for rank in range(launcher.tp):
            launcher.progress(f"plugin-on: a request that comes later to rank {rank}")
            name = f"a request that comes {TURNS} iterations later to rank {rank}, beside another: both exact"
            checks.all_exact(report, name, _late(server, launcher.scale, rank, server.answer_patience))
        took = time.monotonic() - start
        checks.pools_balance(report, server, "pools of every rank are balanced once more")
    return took


def _without_the_overlay(launcher: Launcher, report: Report, up: Up, patience: float) -> None:
    if not plan.called_for(launcher, report, OVERLAY, CONTROL):
        return
    with up as server:
        launcher.progress(f"without-{OVERLAY}: waiting for the defect")
        before = walks.ask(server, *walks.crowd(launcher.scale, 1)[0])
        answers = _late(server, launcher.scale, launcher.tp - 1, max(PATIENCE, patience))
        state = "lives and hangs" if server.alive else f"ended: {server.last_exception()}"
        report.add(
            CONTROL,
            server.alive and before.exact and all(walk.got is None for walk in answers),
            f"before it: {before}; it: {answers[0]}; the one beside it: {answers[1]}; the server {state}",
        )


def _late(server: Server, scale: Scale, rank: int, patience: float) -> list[Walk]:
    """Of a request that comes later to one rank, and of another that decodes meanwhile."""
    prompts = [
        (language.prompt(scale.crowd[0], seed=2000 + rank), STEPS),
        (language.prompt(scale.crowd[0], 2100), scale.steps),
    ]
    late, beside = (
        Client(f"http://127.0.0.1:{server.port}", rid, *prompt, patience)
        for rid, prompt in zip((probe.late_id(rank, TURNS), f"beside-{rank}"), prompts, strict=True)
    )
    with ThreadPoolExecutor(1) as pool:
        asked: list[Future[Walk]] = []

        def ask() -> None:
            if not asked:
                asked.append(pool.submit(lambda: walks.of(late, walks.reply(late.generate))))

        other = walks.of(beside, walks.reply(lambda: beside.stream(4, ask)))
        ask()
        return [asked[0].result(), other]
