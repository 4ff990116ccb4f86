"""Nothing of one test's observer is left for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_hisparse_plugin.observe import counters, events, start, trace


@pytest.fixture(autouse=True)
def nothing_observed() -> Iterator[None]:
    yield
    counters.detach_all()
    events.clear()
    trace.detach_all()
    start.clear()
