"""What happens to requests, counted as it happens. Written by the scheduler's thread, read by the reporter's."""

from __future__ import annotations

from collections import Counter

from .metrics import Metric

Events = dict[tuple[Metric, str], int]
"""How often, by metric and the value of its label."""

_counts: Counter[tuple[Metric, str]] = Counter()


def count(metric: Metric, value: str, times: int = 1) -> None:
    """Add to a counter with one label of its own; other overlays may call this, too."""
    _counts[metric, value] += times


def read() -> Events:
    """Totals since the start."""
    return dict(_counts)


def clear() -> None:
    """Forget everything."""
    _counts.clear()
