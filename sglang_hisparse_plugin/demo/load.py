"""Clients that come, stream, abort and go, all at once, on pools that are too small for them."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from . import checks, language, plan, walks
from .client import Client, Reply
from .report import Part, Report, make
from .scales import Scale
from .server import Server
from .setup import Launcher

POOL = {"cpu": 2048, "cuda": 49152}  #: device tokens; the logical and host pools hold twice as many
CLIENTS_PER_SLOT = 3
REFUSED = re.compile(r"retracted", re.I)  #: by a PD decode server, and to be sent again; each request fits by itself
GOOD = ("exact", "aborted", "disconnected", "refused")
ABORTED = re.compile(r"abort", re.I)  #: what the answer to an abort says, if it says anything


def small(scale: Scale) -> Scale:
    """The same requests on pools that do not hold as many of them as there are slots."""
    return replace(scale, device_tokens=POOL[scale.device])


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    kind: str
    what: str
    """One of GOOD; anything else is a failure and says what."""


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
        return {what: found[what] for what in GOOD}

    def all_kinds(self) -> bool:
        """Whether clients did everything that they do by themselves."""
        return all(count for what, count in self.counts.items() if what != "refused")

    def failures(self) -> list[str]:
        return [f"{o.kind}: {o.what} ({n}x)" for o, n in self.outcomes.items() if o.what not in GOOD]

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
        kind = rng.choice(list(KINDS))
        tokens = language.prompt(rng.randint(*scale.crowd), rng.randrange(10**6))
        steps = rng.randint(1, scale.crowd_steps)
        request = server.client(tokens, steps)
        try:
            what = KINDS[kind](request, rng)
        except (OSError, ValueError) as error:
            what = f"no answer: {type(error).__name__}: {error}"
        tally.add(Outcome(kind, what))


def _walk(request: Client, _: random.Random) -> str:
    return judge(request, request.generate(), aborted=False)


def _stream(request: Client, _: random.Random) -> str:
    return judge(request, request.stream(), aborted=False)


def _abort_streaming(request: Client, rng: random.Random) -> str:
    """After a few tokens, or none."""
    return judge(request, request.stream(rng.randint(0, request.steps), request.abort), aborted=True)


def _abort_soon(request: Client, rng: random.Random) -> str:
    """At any time: in the queue, in prefill, in staging, in decode, or when it has ended.

    Again every second until there is an answer: an abort that overtakes its request is lost, and where the prefill
    server alone has heard of it, the decode server waits for KV for 300 seconds.
    """
    answered = threading.Event()

    def insist() -> None:
        answered.wait(rng.expovariate(1.0))
        while not answered.is_set():
            request.abort(again=True)
            answered.wait(1)

    thread = threading.Thread(target=insist)
    thread.start()
    try:
        return judge(request, request.generate(), aborted=True)
    finally:
        answered.set()
        thread.join()


def _leave_streaming(request: Client, rng: random.Random) -> str:
    reply = request.stream(rng.randint(0, request.steps), request.leave)
    return "disconnected" if reply.left and _prefix(request, reply) else judge(request, reply, aborted=False)


def _leave_at_once(request: Client, rng: random.Random) -> str:
    request.send_and_leave(rng.uniform(0, 1))
    return "disconnected"


KINDS = {
    "walk": _walk,
    "stream": _stream,
    "abort while streaming": _abort_streaming,
    "abort at any time": _abort_soon,
    "leave while streaming": _leave_streaming,
    "leave at once": _leave_at_once,
}


def judge(request: Client, reply: Reply, aborted: bool) -> str:
    """What became of a request."""
    right = language.walk(request.tokens, request.steps)
    if reply.tokens == right:
        return "exact"
    if reply.ended == "abort" or reply.error:
        if not _prefix(request, reply):
            return "wrong tokens before its abort"
        if aborted and (not reply.error or ABORTED.search(reply.error)):
            return "aborted"
        return "refused" if REFUSED.search(reply.error) else f"error: {reply.error[:200]}"
    broken = next((i for i, (a, b) in enumerate(zip(reply.tokens, right, strict=False)) if a != b), len(reply.tokens))
    return f"ended by {reply.ended or 'nothing'}, wrong from step {broken}"


def _prefix(request: Client, reply: Reply) -> bool:
    return reply.tokens == language.walk(request.tokens, request.steps)[: len(reply.tokens)]
