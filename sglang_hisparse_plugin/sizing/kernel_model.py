"""Expected time of a swap-in, from times measured on a grid of batch, misses, row bytes and hot buffer.

Between measured points the time is interpolated linearly along each axis, but not between no miss and some: the first
miss costs a round trip to host memory. Beyond the largest batch or number of misses every kernel waits for the link,
and each further byte costs what the last ones did. A hot buffer outside the grid is taken for the nearest in it.
``swap_in_h200.json`` here is what this needs of ``docs/measurements/swap_in_h200.json``; rewrite it with

    python -m sglang_hisparse_plugin.sizing.kernel_model docs/measurements/swap_in_h200.json
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("swap_in_h200.json")
OURS = "plugin"
Point = tuple[int, int, int, int]


@dataclass(frozen=True)
class KernelModel:
    """Times of one device."""

    device: str
    commit: str
    source: str
    scattered_gbps: Mapping[int, float]
    """GB/s at which scattered rows of that many bytes can be read from host memory."""
    us: Mapping[str, Mapping[Point, float]]
    """By kernel: microseconds of a call by (batch, misses of each request, row bytes, hot buffer)."""

    def call_us(self, kernel: str, batch: int, misses: float, row_bytes: int, hot_buffer: int) -> float:
        """Microseconds of one call, that is of one layer in one step.

        Args:
            kernel: "plugin" or a release as measured.
            misses: of each request, on average.
        """
        grid = self.us[kernel]
        batches, missed, rows, hots = self._axes
        ends = [
            _between(batches, batch),
            _between(missed if misses <= 0 else [number for number in missed if number], misses),
            _between(rows, row_bytes),
            _between(hots, min(max(hot_buffer, hots[0]), hots[-1])),
        ]
        return sum(
            weight_a * weight_b * weight_c * weight_d * grid[a, b, c, d]
            for (a, weight_a), (b, weight_b), (c, weight_c), (d, weight_d) in product(*ends)
        )

    def copy_us(self, batch: int, misses: float, row_bytes: int) -> float:
        """Microseconds that the link needs for a planned copy on a layer that shares another's top-k."""
        ends = _between(sorted(self.scattered_gbps), row_bytes)
        return batch * misses * row_bytes / sum(weight * self.scattered_gbps[size] for size, weight in ends) / 1e3

    @property
    def _axes(self) -> list[list[int]]:
        return [sorted({point[axis] for point in self.us[OURS]}) for axis in range(4)]

    def upstream(self, release: tuple[int, ...]) -> str:
        """The measured kernel of SGLang that is nearest to `release` from below, or the oldest."""
        measured = {_numbers(name): name for name in self.us if name != OURS}
        older = [number for number in measured if number <= release]
        return measured[max(older) if older else min(measured)]


def _between(axis: Sequence[int], value: float) -> list[tuple[int, float]]:
    """The two points of `axis` that a line through `value` is drawn by, with their weights; one where it is exact."""
    if value in axis:
        return [(int(value), 1.0)]
    upper = min(max(bisect_right(axis, value), 1), len(axis) - 1)
    low, high = axis[upper - 1], axis[upper]
    weight = (value - low) / (high - low)
    return [(low, 1.0 - weight), (high, weight)]


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.rsplit(maxsplit=1)[-1].split(".")[:3])


@cache
def stored() -> KernelModel:
    """The model of the record that comes with the package."""
    return from_record(json.loads(STORED.read_text("utf-8")))


def from_record(record: Mapping[str, Any]) -> KernelModel:
    """From a record as `compact` makes it."""
    return KernelModel(
        device=record["device"],
        commit=record["commit"],
        source=record["source"],
        scattered_gbps={int(size): rate for size, rate in record["scattered_gbps"].items()},
        us={
            kernel: {tuple(point): us for point, us in zip(record["points"], times, strict=True)}
            for kernel, times in record["us"].items()
        },
    )


def compact(report: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What the model needs of a full report of ``sglang-hisparse bench``."""
    cells = report["cells"]
    kernels = [kernel for kernel in cells[0]["us"] if kernel == OURS or kernel.startswith("sglang")]
    return {
        "source": source,
        "device": report["device"],
        "commit": report.get("commit", ""),
        "scattered_gbps": report["scattered_gbps"],
        "points": [[cell[key] for key in ("batch", "misses", "row_bytes", "hot")] for cell in cells],
        "us": {kernel: [cell["us"][kernel] for cell in cells] for kernel in kernels},
    }


if __name__ == "__main__":
    file = Path(sys.argv[1])
    STORED.write_text(json.dumps(compact(json.loads(file.read_text("utf-8")), file.as_posix())) + "\n", "utf-8")
