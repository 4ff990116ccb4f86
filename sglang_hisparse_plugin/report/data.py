"""What a report is made of: a kernel bench and, if there is one, a run of the engine; both checked before use."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

OURS = "plugin"
AXES = ("batch", "misses", "row_bytes", "hot")
PER_KERNEL = ("us", "spread", "gbps")
#: Of an engine run's row; the last two may be null or absent.
ENGINE_COLUMNS = {
    "release": "SGLang",
    "mode": "mode",
    "kernel": "kernel",
    "concurrency": "requests at once",
    "context": "context, tokens",
    "tokens_per_s": "tokens/s",
    "ms_per_token": "ms/token",
    "hit_rate": "hit rate",
    "acceptance": "acceptance",
}
OPTIONAL = ("hit_rate", "acceptance")
NUMBERS = ("concurrency", "context", "tokens_per_s", "ms_per_token")
HUGE = 1e15  # no rate and no time is
DEEPEST = 20  # lists and objects in each other, in a record
UNSHOWN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")  # controls; halves of characters
Point = tuple[int, ...]


class ReportError(ValueError):
    """The input makes no report; the text says what is wrong and what to do."""


@dataclass(frozen=True)
class Bench:
    """A report of ``sglang-hisparse bench``."""

    raw: Mapping[str, Any]
    cells: Mapping[Point, Mapping[str, Any]]
    """By (batch, misses, row bytes, hot buffer)."""
    upstream: tuple[str, ...]
    """SGLang's kernels in this run; empty where none was installed."""

    def axis(self, name: str) -> list[int]:
        """Sorted values of one of AXES."""
        return sorted({point[AXES.index(name)] for point in self.cells})

    def us(self, point: Point) -> float:
        """Microseconds of our kernel."""
        return float(self.cells[point]["us"][OURS])

    def best(self, point: Point) -> float | None:
        """Microseconds of the fastest of SGLang's kernels."""
        return min((float(self.cells[point]["us"][name]) for name in self.upstream), default=None)

    def ratio(self, point: Point) -> float:
        """How many times as long the best of SGLang's takes; where none was measured, the bound over ours."""
        best = self.best(point)
        return (float(self.cells[point]["bound_us"]) if best is None else best) / self.us(point)

    @property
    def baseline(self) -> str:
        """What ratios are taken to."""
        if not self.upstream:
            return "the bound"
        return self.upstream[0] if len(self.upstream) == 1 else f"the best of {len(self.upstream)} SGLang kernels"

    def summary(self) -> dict[str, float]:
        """Median, least and greatest ratio, cells slower than the baseline, and the median over the bound."""
        ratios = [self.ratio(point) for point in self.cells]
        return {
            "cells": len(ratios),
            "median": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
            "slower": sum(ratio < 1 for ratio in ratios),
            "over_bound": statistics.median(float(cell["over_bound"][OURS]) for cell in self.cells.values()),
        }


@dataclass(frozen=True)
class Engine:
    """Rows of an end-to-end run, and what else its file says."""

    rows: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any]

    @property
    def columns(self) -> dict[str, str]:
        """Titles by key: the known ones, then whatever else the rows have."""
        others = dict.fromkeys(key for row in self.rows for key in row if key not in ENGINE_COLUMNS)
        return {**ENGINE_COLUMNS, **{key: key.replace("_", " ") for key in others}}


def read_bench(file: Path) -> Bench:
    """From the file of ``bench --json``.

    Raises:
        ReportError: it cannot be read, or `bench` finds fault with it.
    """
    return bench(_load(file), str(file))


def bench(raw: Any, name: str = "the report") -> Bench:
    """From a report as a dictionary.

    Raises:
        ReportError: a part is missing or of a wrong kind, or the grid has holes.
    """
    remedy = "give the file that `sglang-hisparse bench --json FILE` wrote"
    if not isinstance(raw, dict) or not isinstance(raw.get("cells"), list) or not raw["cells"]:
        raise ReportError(f"{name} has no cells: {remedy}")
    if absent := [key for key in ("device", "copy_engine_gbps", "scattered_gbps") if key not in raw]:
        raise ReportError(f"{name} does not say {', '.join(absent)}: {remedy}")
    rates = raw["scattered_gbps"]
    if not isinstance(rates, dict) or not all(map(_is_rate, [raw["copy_engine_gbps"], *rates.values()])):
        raise ReportError(f"copy_engine_gbps or scattered_gbps of {name} is no number above 0: {remedy}")
    if not _are_runs(raw.get("scattered_gbps_runs") or {}):
        raise ReportError(f"scattered_gbps_runs of {name} is not as bench writes it: {remedy}")
    costs = raw.get("counting_cost_percent") or {}
    if not isinstance(costs, dict) or not all(map(_is_number, costs.values())):
        raise ReportError(f"counting_cost_percent of {name} is not as bench writes it: {remedy}")
    cells: dict[Point, Mapping[str, Any]] = {}
    for number, cell in enumerate(raw["cells"]):
        try:
            point = tuple(int(cell[key]) for key in AXES)
            _check_cell(cell, list(raw["cells"][0]["us"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ReportError(f"cell {number} of {name} is not as bench writes it ({reason}): {remedy}") from error
        if point in cells:
            raise ReportError(f"{name} has the cell {_name(point)} twice: bench the grid in one run")
        cells[point] = cell
    axes = [sorted({point[axis] for point in cells}) for axis in range(len(AXES))]
    if missing := [point for point in product(*axes) if point not in cells]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ReportError(
            f"{name} lacks {len(missing)} of {len(cells) + len(missing)} cells of its grid: "
            f"{'; '.join(map(_name, missing[:3]))}{more}. Was the run cut short? Repeat `sglang-hisparse bench --json`"
        )
    if not any(axes[1]):
        raise ReportError(
            f"no cell of {name} has a miss, so there is nothing to draw. Was the file cut short? {remedy}"
        )
    if absent_rows := [row for row in axes[2] if str(row) not in {str(key) for key in raw["scattered_gbps"]}]:
        raise ReportError(f"{name} has no scattered_gbps of rows of {absent_rows[0]} bytes: {remedy}")
    kernels = raw["cells"][0]["us"]
    return Bench(raw, cells, tuple(kernel for kernel in kernels if kernel.startswith("sglang")))


def read_engine(file: Path) -> Engine:
    """From a list of rows, or an object with `rows` and whatever describes the run.

    Raises:
        ReportError: it cannot be read, or a row lacks something.
    """
    raw = _load(file)
    rows = raw.get("rows") if isinstance(raw, dict) else raw
    wanted = [key for key in ENGINE_COLUMNS if key not in OPTIONAL]
    if not isinstance(rows, list) or not rows:
        raise ReportError(f"{file} has no rows: give an object with `rows`, each with {', '.join(wanted)}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or (absent := [key for key in wanted if row.get(key) is None]):
            lacks = ", ".join(absent) if isinstance(row, dict) else "everything: it is no object"
            raise ReportError(f"row {number} of {file} lacks {lacks}; only {' and '.join(OPTIONAL)} may be left out")
        if odd := [key for key in NUMBERS if not isinstance(row[key], (int, float)) or isinstance(row[key], bool)]:
            raise ReportError(f"row {number} of {file}: {odd[0]} is {row[odd[0]]!r}, which is no number")
    return Engine(rows, {key: value for key, value in raw.items() if key != "rows"} if isinstance(raw, dict) else {})


def spell(ratio: float) -> str:
    """Two places; three, and never 1.000, for what is hardly less than 1."""
    return f"{min(ratio, 0.999):.3f}" if 0.995 <= ratio < 1 else f"{ratio:.2f}"


def _check_cell(cell: Mapping[str, Any], kernels: list[str]) -> None:
    if OURS not in kernels:
        raise ValueError(f"no kernel is called {OURS}")
    for key in PER_KERNEL:
        if list(cell[key]) != kernels:
            raise ValueError(f"{key} has {', '.join(cell[key])}, the first cell {', '.join(kernels)}")
    if not all(_is_rate(value) for value in cell["us"].values()):
        raise ValueError("a time is not above 0, or no number")
    if not all(
        isinstance(ends, (list, tuple)) and len(ends) == 2 and all(map(_is_rate, ends))
        for ends in cell["spread"].values()
    ):
        raise ValueError("spread is no pair of numbers")
    if not all(_is_number(rate) and rate >= 0 for rate in cell["gbps"].values()):
        raise ValueError("gbps is no number")
    if not all(map(_is_rate, [cell["bound_us"], *cell["over_bound"].values()])):
        raise ValueError("a bound is not above 0, or no number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -HUGE < value < HUGE


def _is_rate(value: Any) -> bool:
    return _is_number(value) and value > 0


def _are_runs(runs: Any) -> bool:
    """Whether it has a rate by number of thread blocks, by row size, by when it was measured."""
    if not isinstance(runs, dict) or not all(isinstance(sizes, dict) for sizes in runs.values()):
        return False
    found = [blocks for sizes in runs.values() for blocks in sizes.values()]
    return all(isinstance(blocks, dict) and blocks and all(map(_is_rate, blocks.values())) for blocks in found)


def _load(file: Path) -> Any:
    try:
        raw = json.loads(file.read_text("utf-8"))
        odd = next(filter(UNSHOWN.search, _texts(raw, DEEPEST)), None)
    except OSError as error:
        raise ReportError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReportError(f"{file} is no UTF-8: give it as it was written, or convert it") from error
    except ValueError as error:
        raise ReportError(f"{file} is no JSON: {error}") from error
    except RecursionError as error:
        raise ReportError(f"{file} is nested too deeply for a record") from error
    if odd is not None:
        raise ReportError(f"{file} has a text with characters that cannot be shown: {ascii(odd)[:60]}")
    return raw


def _texts(raw: Any, deepest: int) -> Iterator[str]:
    """Every text in it, names of values included.

    Raises:
        RecursionError: it is nested more than `deepest` times.
    """
    if deepest < 0:
        raise RecursionError
    if isinstance(raw, str):
        yield raw
    elif isinstance(raw, (list, dict)):
        for part in [*raw, *raw.values()] if isinstance(raw, dict) else raw:
            yield from _texts(part, deepest - 1)


def _name(point: Point) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(AXES, point, strict=True))
