"""What happens to requests, counted as it happens. Written by the scheduler's thread, read by the reporter's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .metrics import REFUSED, TOO_SMALL, Metric

Events = dict[tuple[Metric, str], int]
"""How often, by metric and the value of its label."""

COUNTED = "hisparse_counted"  #: attribute of a request that was counted as refused or aborted

_counts: Counter[tuple[Metric, str]] = Counter()
_left_out: list[Metric] = []


def count(metric: Metric, value: str, times: int = 1) -> None:
    """Add to a counter with one label of its own; other overlays may call this, too."""
    if metric not in _left_out:
        _counts[metric, value] += times


def count_once(metric: Metric, req: Any, value: str) -> None:
    """Count a request that is refused or aborted, unless it was before: its later end is no second one."""
    if not getattr(req, COUNTED, False):
        setattr(req, COUNTED, True)
        count(metric, value)


def refused(req: Any, lacking: str) -> None:
    """Count a request for which a pool, by its name, is too small."""
    count_once(REFUSED, req, TOO_SMALL[lacking])


@contextlib.contextmanager
def left_out(metric: Metric) -> Iterator[None]:
    """What happens meanwhile has another name."""
    _left_out.append(metric)
    try:
        yield
    finally:
        _left_out.remove(metric)


def read() -> Events:
    """Totals since the start."""
    return dict(_counts)


def clear() -> None:
    """Forget everything."""
    _counts.clear()
