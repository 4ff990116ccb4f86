"""Clients that come, stream, abort and go, all at once, on pools that are too small for them."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from . import checks, language, manners, plan, walks
from .report import Part, Report, make
from .scales import Scale
from .server import Server
from .setup import Launcher

POOL = {"cpu": 2048, "cuda": 49152}  #: device tokens; the logical and host pools hold twice as many
CLIENTS_PER_SLOT = 3


def small(scale: Scale) -> Scale:
    """The same requests on pools that do not hold as many of them as there are slots."""
    return replace(scale, device_tokens=POOL[scale.device])


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    kind: str
    what: str
    """One of `manners.GOOD`; anything else is a failure and says what."""


@dataclass
class Tally:
    """What the clients saw; they share it."""

    outcomes: Counter[Outcome]
    lock: threading.Lock

    def add(self, outcome: Outcome) -> None:
        with self.lock:
            self.outcomes[outcome] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Of what is no failure."""
        found: Counter[str] = Counter()
        for outcome, n in self.outcomes.items():
            found[outcome.what] += n
        return {what: found[what] for what in manners.GOOD}

    def all_kinds(self) -> bool:
        """Whether clients did everything that they do by themselves."""
        return all(count for what, count in self.counts.items() if what != "refused")

    def failures(self) -> list[str]:
        return [f"{o.kind}: {o.what} ({n}x)" for o, n in self.outcomes.items() if o.what not in manners.GOOD]

    def figures(self) -> dict[str, float]:
        return {"requests": self.outcomes.total(), **self.counts}

    def summary(self) -> str:
        """The first failures, else all there was."""
        detail = ", ".join(f"{n} {what}" for what, n in self.counts.items())
        return "; ".join(self.failures()[:3]) or f"{self.outcomes.total()} requests: {detail}"


def run(launcher: Launcher, seconds: float, seed: int = 0) -> Report:
    """The checks on one release, under `seconds` of load."""
    report = Report(launcher.target.name, launcher.progress)
    parts: list[Part] = [("under load", lambda: _under_load(launcher, report, seconds, seed))]
    make(report, parts)
    return report


def _under_load(launcher: Launcher, report: Report, seconds: float, seed: int) -> None:
    scale = launcher.scale
    with launcher.server("load", retract=True) as server:
        plan.plugin_active(launcher, report, server)
        tally = drive(server, scale, seconds, seed, launcher.progress)
        report.add(
            "every request is answered once, every walk exact as far as it went",
            tally.outcomes.total() > 0 and not tally.failures(),
            tally.summary(),
        )
        name = "clients did all of it, and nobody was refused"
        report.add(name, tally.all_kinds() and not tally.counts["refused"], tally.summary())
        checks.were_retracted(report, server)
        last = server.last_exception()
        detail = last or "no exception in its log" if server.alive else f"the server ended: {last}"
        report.add("the scheduler is alive", server.alive, detail)
        checks.pools_balance(report, server, "pools are balanced at idle")
        checks.all_exact(
            report, "a walk afterwards is exact", [walks.ask(server, *each) for each in walks.crowd(scale, 1)]
        )
        for rank in range(launcher.tp):
            checks.one_wrong_row(launcher, report, server, layer=0, rank=rank)
        report.figures |= {"load_seconds": seconds, "seed": seed, **tally.figures()}


def drive(server: Server, scale: Scale, seconds: float, seed: int, progress: Callable[[str], None]) -> Tally:
    """So many clients for so many seconds; returns when each has its last answer."""
    tally, end = Tally(Counter(), threading.Lock()), time.monotonic() + seconds
    clients = CLIENTS_PER_SLOT * scale.slots
    with ThreadPoolExecutor(clients) as pool:
        try:
            jobs = [
                pool.submit(_client, server, scale, random.Random(f"{seed}/{i}"), end, tally) for i in range(clients)
            ]
            while not all(job.done() for job in jobs):
                left, done = max(0, end - time.monotonic()), tally.outcomes.total()
                progress(f"load: {clients} clients, {done} requests answered, {left:.0f} s left")
                time.sleep(2)
            for job in jobs:
                job.result()
        except BaseException:
            server.stop()
            raise
    return tally


def _client(server: Server, scale: Scale, rng: random.Random, end: float, tally: Tally) -> None:
    while time.monotonic() < end and server.alive:
        kind = rng.choice(list(manners.KINDS))
        tokens = language.prompt(rng.randint(*scale.crowd), rng.randrange(10**6))
        steps = rng.randint(1, scale.crowd_steps)
        request = server.client(tokens, steps)
        try:
            what = manners.KINDS[kind](request, rng)
        except (OSError, ValueError) as error:
            what = f"no answer: {type(error).__name__}: {error}"
        tally.add(Outcome(kind, what))
