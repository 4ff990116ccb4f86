"""A bench as tables for a terminal, no wider than it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import lines
from . import origin
from .data import OURS, Bench, Point, spell

#: Columns that a narrow terminal does without, the first to go first.
OPTIONAL = ("spread", "% link", "GB/s")
WIDE = 1000  # columns; any table fits


def show(bench: Bench, console: Console) -> None:
    """Print what was measured, the link, and a table for each row size and hot buffer."""
    raw = bench.raw
    scattered = ", ".join(f"{rate} at {row} B" for row, rate in origin.ceilings(raw).items())
    print(lines.fill(f"Measured with {origin.sentence(raw)}", "  "))
    print(
        lines.fill(
            f"Host to device: copy engine {raw['copy_engine_gbps']:.1f} GB/s; scattered rows, GB/s: {scattered}", "  "
        )
    )
    costs = raw.get("counting_cost_percent")
    if isinstance(costs, dict) and costs:
        told = ", ".join(f"{cost:+.2f}% of {kind}" for kind, cost in costs.items())
        print(lines.fill(f"Counters on cost {told} (medians)"))
    if raw.get("note"):
        print(lines.fill(f"note: {raw['note']}", "  "))
    print(
        lines.fill(f"us: of one call, median; / bound: over what chip and link allow; gain: {bench.baseline} over ours")
    )
    for hot in bench.axis("hot"):
        for row in bench.axis("row_bytes"):
            points = [point for point in bench.cells if point[2:] == (row, hot)]
            console.print(f"\n{row}-byte rows, hot buffer {hot}", highlight=False)
            table = _narrowed(bench, points, console)
            width = console.width
            console.width = max(width, _width(table, console))  # rather than to cut a number
            console.print(table)
            console.width = width


def _narrowed(bench: Bench, points: Sequence[Point], console: Console) -> Table:
    for dropped in range(len(OPTIONAL) + 1):
        table = _table(bench, points, OPTIONAL[:dropped])
        if _width(table, console) <= console.width:
            break
    return table


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=WIDE)).maximum


def _table(bench: Bench, points: Sequence[Point], dropped: Sequence[str]) -> Table:
    columns: dict[str, Callable[[Point], str]] = {
        "batch": lambda point: str(point[0]),
        "misses": lambda point: str(point[1]),
        "us": lambda point: f"{bench.us(point):.1f}",
        "spread": lambda point: "{:.1f}-{:.1f}".format(*bench.cells[point]["spread"][OURS]),
        "GB/s": lambda point: f"{bench.cells[point]['gbps'][OURS]:.1f}" if point[1] else "",
        "% link": lambda point: f"{_link_percent(bench, point):.0f}" if point[1] else "",
        "/ bound": lambda point: f"{float(bench.cells[point]['over_bound'][OURS]):.2f}",
    }
    for kernel in bench.upstream:
        release = kernel.rpartition(" ")[2]
        columns[f"SGLang\n{release}"] = lambda point, kernel=kernel: f"{bench.cells[point]['us'][kernel]:.1f}"  # type: ignore[misc]
    if bench.upstream:
        columns["gain"] = lambda point: spell(bench.ratio(point))
    shown = {title: cell for title, cell in columns.items() if title not in dropped}
    table = Table(box=None, pad_edge=False)
    for title in shown:
        table.add_column(Text(title), justify="right", no_wrap=True)
    for point in points:
        table.add_row(*(cell(point) for cell in shown.values()))
    return table


def _link_percent(bench: Bench, point: Point) -> float:
    return 100 * float(bench.cells[point]["gbps"][OURS]) / float(bench.raw["copy_engine_gbps"])
