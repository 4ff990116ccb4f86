"""One reading of everything, and what lies between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from ..kernels.counters import BYTES, COPIES, COUNTERS, HITS, MISSES, REQUESTS
from . import events

LAYER_GROUPS = 8  #: at most; a metric per layer would be hundreds of series


@dataclass(frozen=True)
class Sample:
    """Totals since the start, and the state of the moment."""

    counts: list[list[int]] = field(default_factory=list)
    """[layers][COUNTERS], see `kernels.counters`."""
    pools: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Slots in use and slots of the device, host and logical pool."""
    staging: int = 0
    """Requests in the staging queue."""
    events: events.Events = field(default_factory=dict)

    def since(self, earlier: Sample) -> Sample:
        """This sample with totals counted from `earlier` on."""
        before = earlier.counts or [[0] * COUNTERS for _ in self.counts]
        counts = [[b - a for a, b in zip(old, new, strict=True)] for old, new in zip(before, self.counts, strict=True)]
        happened = {key: n - earlier.events.get(key, 0) for key, n in self.events.items()}
        return Sample(counts, self.pools, self.staging, happened)

    def total(self, what: int) -> int:
        """One number of `kernels.counters` over all layers."""
        return sum(row[what] for row in self.counts)

    @property
    def misses_per_call(self) -> list[int]:
        """How many calls fall in each of `kernels.counters.MISS_BUCKETS`."""
        return [self.total(i) for i in range(MISSES, COUNTERS)]

    @property
    def hit_rate(self) -> float | None:
        """Hits per selected entry; None when nothing was selected."""
        selected = self.total(HITS) + self.total(COPIES)
        return self.total(HITS) / selected if selected else None

    @property
    def idle(self) -> bool:
        """Whether nothing was swapped in and nothing happened to a request."""
        return not self.total(REQUESTS) and not any(self.events.values())

    def by_group(self) -> dict[str, tuple[int, int, int]]:
        """Hits, misses and bytes by name of the layer group, such as "0-7"."""
        return {
            f"{first}-{end - 1}" if end - first > 1 else f"{first}": tuple_of(self.counts[first:end])
            for first, end in groups(len(self.counts))
        }

    def line(self) -> str:
        """The log line of an interval."""
        rate, calls = self.hit_rate, self.total(REQUESTS)
        swaps = "no swap-in"
        if rate is not None and calls:
            swaps = (
                f"hit rate {rate:.2%}, {self.total(COPIES) / calls:.1f} misses per request and layer, "
                f"{self.total(BYTES) / 1e6:.1f} MB from host"
            )
        pools = ", ".join(f"{name} {used}/{size}" for name, (used, size) in self.pools.items())
        happened = "".join(f", {metric.name} ({value}) {n}" for (metric, value), n in self.events.items() if n)
        quiet = "; the next line when something changes" if self.idle else ""
        return f"HiSparse: {swaps}; pools {pools}; {self.staging} staging{happened}{quiet}"


def tuple_of(rows: list[list[int]]) -> tuple[int, int, int]:
    """Hits, misses and bytes of some layers together."""
    return sum(r[HITS] for r in rows), sum(r[COPIES] for r in rows), sum(r[BYTES] for r in rows)


def groups(layers: int) -> list[tuple[int, int]]:
    """First layer and end of each group of neighbours, as equal in size as can be."""
    number = min(layers, LAYER_GROUPS)
    return list(pairwise(layers * i // number for i in range(number + 1))) if number else []


Reader = Callable[[], Sample]
