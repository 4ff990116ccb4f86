"""A server that answers as the model would, but for what a test replaces; and what launches it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from sglang_hisparse_plugin.demo import language, probe, scales, setup
from sglang_hisparse_plugin.demo.report import Report
from sglang_hisparse_plugin.demo.server import Answer, Server
from sglang_hisparse_plugin.patching.outcome import Applied, Skipped

SCALE = dataclasses.replace(
    scales.CPU, long=(300, 200), crowd=(100, 200), crowd_size=6, steps=70, crowd_steps=20, hot_buffer=64
)
PLAN = {"retract-order": Applied("a"), "slot-count": Skipped("b"), "swap-in": Skipped("c")}
LOG = """HiSparse plugin 1
HiSparse overlay retract-order: applied: a
HiSparse overlay slot-count: skipped: b
HiSparse overlay swap-in: skipped: c
Testing retraction. #retracted_reqs: 1, #new
"""
POOLS = {"host slots": 8, "device slots": 4}


class FakeServer:
    """Answers as the model would; a test replaces one of its manners."""

    log = LOG
    state: ClassVar[dict[str, Any]] = {"start": POOLS, "now": POOLS, "swap_in": {"hits": 1, "misses": 2, "bytes": 3}}
    dies = False

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(
        self, tokens: list[int], steps: int, rid: str | None = None, rank: int | None = None, temperature: float = 0
    ) -> Answer:
        return Answer(self.answer(tokens, steps, rid), self.verifications(steps))

    def verifications(self, steps: int) -> int:
        return 0

    def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
        if self.dies:
            raise ConnectionResetError("gone")
        right = language.walk(tokens, steps)
        return self.break_walk(right, -8) if rid and rid.startswith("hisparse-fault") else right

    def break_walk(self, right: list[int], step: int) -> list[int]:
        return [*right[:step], language.Edge(language.FIRST_LAP, 0, 0).token + 1, *right[step:][1:]]

    def internal_state(self) -> dict[str, Any]:
        return {probe.KEY: self.state}

    def log_text(self) -> str:
        return self.log

    def ended(self, within: float) -> bool:
        return self.dies

    last_exception = Server.last_exception

    def stop(self) -> None:
        self.stopped = True


class FakeLauncher:
    """Hands out a server of `kind` wherever the plugin is on, and one that dies where it is off."""

    scale = SCALE
    target = setup.Target("fake", Path("nowhere"))
    tp = dp = pp = 1

    def __init__(self, kind: type[FakeServer], off: type[FakeServer]) -> None:
        self.kind, self.off = kind, off

    def server(self, name: str, plugin: str = "auto", **_: object) -> FakeServer:
        return self.off() if plugin == "off" else self.kind()

    def progress(self, text: str) -> None:
        pass


class Dead(FakeServer):
    log = "Traceback\nValueError: only one element\n"
    dies = True


def failed(report: Report) -> list[str]:
    return [check.name for check in report.checks if check.passed is False]
