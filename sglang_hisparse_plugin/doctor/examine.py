"""Gathers the facts of all probes, then has each judge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from . import sandbox
from .finding import Finding, Level
from .launch import Launch

Facts = dict[str, Any]
"""What one probe has gathered, as JSON."""


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    launch: Launch = field(default_factory=Launch)
    sglang_path: Path | None = None
    """An unpacked SGLang instead of the installed one."""
    transfer: bool = True
    """Whether to measure the host-to-device rate."""
    time_limit_s: float | None = None
    """No probe may take longer, whatever its own limit is."""
    root: Path = Path("/")
    """Where ``proc`` and ``sys`` are."""


@dataclass(frozen=True)
class Examined:
    """The facts of all probes, for judging; those of a probe that gave none are empty."""

    subject: Subject
    outcomes: Mapping[str, sandbox.Outcome]

    def facts(self, probe: str) -> Facts:
        """The facts of a probe."""
        outcome = self.outcomes.get(probe)
        return outcome.value if outcome and isinstance(outcome.value, dict) else {}

    def failure(self, probe: str) -> str:
        """Why a probe gave no facts; empty when it did."""
        outcome = self.outcomes.get(probe)
        return outcome.failure if outcome else ""


@dataclass(frozen=True)
class Probe:
    """One row of the table."""

    name: str
    gather: Callable[[Subject], Facts]
    """Runs in a process of its own; may raise, crash or hang."""
    judge: Callable[[Examined], Iterable[Finding]]
    """Reads facts alone, its own and those of others."""
    shown: Callable[[Facts], str]
    """The facts in one line."""
    limit_s: float = 20.0
    failed: Callable[[Examined, str], Iterable[Finding]] | None = None
    """Judges why there are no facts; without it that is a warning of the general kind."""
    alone: bool = False
    """It measures, so nothing else runs meanwhile."""


@dataclass(frozen=True)
class Examination:
    """Everything that was seen and what it means."""

    probes: Sequence[Probe]
    examined: Examined
    findings: Sequence[Finding]
    """The worst first."""

    @property
    def worst(self) -> Level:
        """The level that decides the exit code."""
        return max((finding.level for finding in self.findings), default=Level.NOTE)


def examine(subject: Subject, probes: Sequence[Probe]) -> Examination:
    """Never raises for anything that is wrong with what is examined."""
    outcomes: dict[str, sandbox.Outcome] = {}
    for alone in (False, True):
        jobs = {p.name: _job(p, subject) for p in probes if p.alone == alone}
        outcomes.update(sandbox.run(jobs))
    return judge(Examined(subject, {p.name: outcomes[p.name] for p in probes}), probes)


def judge(examined: Examined, probes: Sequence[Probe]) -> Examination:
    """What the facts mean."""
    findings = [
        dataclasses.replace(finding, probe=probe.name) for probe in probes for finding in _judge(probe, examined)
    ]
    return Examination(probes, examined, sorted(findings, key=lambda finding: -finding.level))


def _job(probe: Probe, subject: Subject) -> sandbox.Job:
    limit_s = min(probe.limit_s, subject.time_limit_s or probe.limit_s)
    return sandbox.Job(partial(probe.gather, subject), limit_s)


def _judge(probe: Probe, examined: Examined) -> list[Finding]:
    try:
        failure = examined.failure(probe.name)
        if not failure:
            return list(probe.judge(examined))
        if probe.failed:
            return list(probe.failed(examined, failure))
        return [
            Finding(
                Level.WARNING,
                f"{probe.name} could not be looked at: {failure}",
                "run `sglang-hisparse doctor --json` and read what the probe printed; "
                "--time-limit sets how long a probe may take",
            )
        ]
    except Exception as error:  # facts of a shape that nobody thought of
        return [
            Finding(
                Level.WARNING,
                f"{probe.name} could not be judged: {type(error).__name__}: {error}",
                "report this, with the output of `sglang-hisparse doctor --json`; the other findings hold",
            )
        ]
