"""How long to wait for a process that may be one of many on this machine."""

from __future__ import annotations

import os
import time


def share() -> float:
    """Of a core that a busy process gets here, at the most 1: as many as there are, for all that want to run."""
    return min(1.0, (os.cpu_count() or 1) / max(os.getloadavg()[0], 1e-3))


def stretched(seconds: float) -> float:
    """What takes a core `seconds` takes here so many, as long as the machine stays as busy."""
    return seconds / share()


class Deadline:
    """So many seconds from now on; they pass more slowly while the machine is busy."""

    def __init__(self, seconds: float) -> None:
        self._left, self._then = seconds, time.monotonic()

    def passed(self) -> bool:
        now = time.monotonic()
        self._left -= (now - self._then) * share()
        self._then = now
        return self._left <= 0
