"""How a `Sample` is taken from a running scheduler: only numbers are read, by a thread that is not the scheduler's."""

from __future__ import annotations

from typing import Any

from .. import upstream
from . import counters, events
from .sample import Reader, Sample


def reader(scheduler: Any) -> Reader:
    """A function that takes a sample. Pools are measured against what is free now, when nothing runs yet."""
    sizes = upstream.free_slots(scheduler)

    def read() -> Sample:
        free = upstream.free_slots(scheduler)
        counts = [row for counted in counters.attached() for row in counted.read()]
        pools = {pool: (size - free[pool], size) for pool, size in sizes.items()}
        staging = len(scheduler.hisparse_coordinator.ack_staging_queue)
        return Sample(counts, pools, staging, events.read())

    return read
