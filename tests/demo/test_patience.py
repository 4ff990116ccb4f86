"""A busy machine is given time, and no more than its load explains."""

from __future__ import annotations

import os
import time

import pytest

from sglang_hisparse_plugin.demo.patience import Deadline, stretched


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (1.0, 1), (4.0, 1), (8.0, 2), (200.0, 50)])
def test_seconds_pass_more_slowly_by_the_load_of_a_core(
    load: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert stretched(30) == 30 * times
    deadline = Deadline(30)
    now += 29.5 * times
    assert not deadline.passed()
    now += times
    assert deadline.passed()


def test_a_load_that_has_ended_counts_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, load = 0.0, 10.0
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(30)
    now += 100
    assert not deadline.passed(), "10 of its seconds"
    load = 0.0
    now += 19
    assert not deadline.passed()
    now += 1
    assert deadline.passed()
