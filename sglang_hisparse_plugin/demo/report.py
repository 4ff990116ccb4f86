"""What is found out about one release: checks and figures, made part by part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from .server import Progress, ServerFailed


@dataclass
class Check:
    """One claim about one release."""

    name: str
    passed: bool | None
    """None: does not apply to this release; `detail` says why."""
    detail: str

    def __str__(self) -> str:
        verdict = {True: "holds", False: "FAILS", None: "n/a"}[self.passed]
        return f"{verdict}: {self.name}: {self.detail.partition(chr(10))[0]}"


def _unheard(_: str) -> None:
    pass


@dataclass
class Report:
    """Checks and figures of one release, in the order in which they were made."""

    release: str
    say: InitVar[Progress] = _unheard
    """Hears of each check when it is made: a run that is cut short has not been for nothing."""
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self, say: Progress) -> None:
        self._say = say

    def add(self, name: str, passed: bool | None, detail: str) -> None:
        self.checks.append(Check(name, passed, detail))
        self._say(str(self.checks[-1]))

    @property
    def passed(self) -> bool:
        """Every check held, and none is missing because an earlier one could not finish."""
        return bool(self.checks) and all(check.passed is not False for check in self.checks)


Part = tuple[str, Callable[[], None]]  #: a name for when it cannot be made, and what makes its checks


def make(report: Report, parts: list[Part]) -> None:
    """Make the checks of each part. A server that does not start is a failed check, not an exception."""
    start = time.monotonic()
    for name, part in parts:
        try:
            part()
        except (ServerFailed, OSError) as error:
            report.add(name, False, str(error))
    report.figures["seconds"] = round(time.monotonic() - start, 1)
