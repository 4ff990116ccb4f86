"""What the doctor found wrong, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.IntEnum):
    """How bad it is; the exit code is the worst one."""

    NOTE = 0
    """Worth knowing; nothing has to be done."""
    WARNING = 1
    """The server will serve, but slower, unrepaired, or not for sure."""
    ERROR = 2
    """The server will not start, or not survive."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. A finding that nobody can act on is none, so there is always a remedy."""

    level: Level
    what: str
    remedy: str
    probe: str = ""
    """Name of the probe; `examine` fills it in."""

    def __post_init__(self) -> None:
        if not self.what or not self.remedy:
            raise ValueError("a finding says what is wrong and what to do")


def note(what: str, remedy: str) -> Finding:
    """A finding at level NOTE."""
    return Finding(Level.NOTE, what, remedy)


def warning(what: str, remedy: str) -> Finding:
    """A finding at level WARNING."""
    return Finding(Level.WARNING, what, remedy)


def error(what: str, remedy: str) -> Finding:
    """A finding at level ERROR."""
    return Finding(Level.ERROR, what, remedy)
