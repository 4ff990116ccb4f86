"""The pictures: drawn once, and saved as PNG in plain colours and as SVG whose colours the page decides."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import origin
from .data import OURS, Bench, ReportError, spell

#: Okabe-Ito, told apart with any kind of colour vision. In SVG each becomes a variable of the page, by its place.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKS = ("o", "s", "^", "D")
INK = "#010203"  # axes and text; `currentColor` in SVG
MOST_LINES = len(COLOURS)
TEXT = 10  # points, in figures whose width is a phone's
LETTERS = 10  # of that size in an inch
Draw = Callable[[Bench, int, int, Any], None]


def available() -> None:
    """Raise unless there is what draws.

    Raises:
        ReportError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            f"a report needs matplotlib ({error}): pip install 'sglang-hisparse-plugin[report]'"
        ) from error


def batches(bench: Bench) -> list[int]:
    """The batches that are drawn: some of all, from the smallest to the largest."""
    every = bench.axis("batch")
    last = len(every) - 1
    count = min(MOST_LINES, len(every))
    return [every[round(i * last / max(count - 1, 1))] for i in range(count)]


def rates(bench: Bench, row: int, hot: int, axes: Any) -> None:
    """GB/s against misses, and what the link gives."""
    for batch, colour, mark in _lines(bench):
        points = [(batch, misses, row, hot) for misses in bench.axis("misses") if misses]
        across = [point[1] for point in points]
        ours = [bench.cells[point]["gbps"][OURS] for point in points]
        axes.plot(across, ours, color=colour, marker=mark, ms=4, label=_batch(bench, batch))
        if bench.upstream:
            best = [max(bench.cells[point]["gbps"][name] for name in bench.upstream) for point in points]
            axes.plot(across, best, color=colour, ls="--", lw=1)
    limits = {"copy engine": bench.raw["copy_engine_gbps"], "scattered rows": _scattered(bench, row)}
    for (name, rate), style in zip(limits.items(), (":", "-"), strict=True):
        axes.axhline(rate, color=INK, lw=1, ls=style, label=f"{name} {rate:.1f}")
    axes.set_ylim(0, max(limits.values()) * 1.05)
    axes.set_ylabel("GB/s")
    _finish(bench, axes)


def times(bench: Bench, row: int, hot: int, axes: Any) -> None:
    """Microseconds of a call against misses, with the bound."""
    for batch, colour, mark in _lines(bench):
        points = [(batch, misses, row, hot) for misses in bench.axis("misses")]
        across = [max(point[1], 1) for point in points]
        axes.plot(
            across, [bench.us(point) for point in points], color=colour, marker=mark, ms=4, label=_batch(bench, batch)
        )
        if bench.upstream:
            axes.plot(across, [bench.best(point) for point in points], color=colour, ls="--", lw=1)
        axes.plot(across, [bench.cells[point]["bound_us"] for point in points], color=colour, ls=":", lw=1)
    axes.plot([], [], color=INK, lw=1, ls=":", label="bound")
    axes.set_yscale("log")
    axes.set_ylabel("microseconds")
    _finish(bench, axes)
    if 0 in bench.axis("misses"):
        axes.set_xlabel("misses per request (leftmost: none)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def heat(bench: Bench) -> Any:
    """The whole grid: how many times as long the baseline takes; for PNG only, the page has tables."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    rows, hots = bench.axis("row_bytes"), bench.axis("hot")
    figure = Figure(figsize=(1.5 + 3.6 * len(rows), 0.9 + 2.8 * len(hots)), layout="constrained")
    grid = figure.subplots(len(hots), len(rows), squeeze=False)
    highest = max(bench.summary()["greatest"], 1.1)
    norm = TwoSlopeNorm(1.0, min(0.8, bench.summary()["least"]), highest)
    for line, hot in enumerate(hots):
        for column, row in enumerate(rows):
            axes = grid[line][column]
            table = [[bench.ratio((b, m, row, hot)) for b in bench.axis("batch")] for m in bench.axis("misses")]
            axes.imshow(table, cmap="PuOr", norm=norm, aspect="auto")
            for y, ratios in enumerate(table):
                for x, ratio in enumerate(ratios):
                    dark = ratio > 1 + (highest - 1) * 0.65
                    axes.text(
                        x, y, spell(ratio), ha="center", va="center", size=7.5, color="white" if dark else "black"
                    )
            axes.set_xticks(range(len(bench.axis("batch"))), bench.axis("batch"))
            axes.set_yticks(range(len(bench.axis("misses"))), bench.axis("misses"))
            axes.set_title(f"{row}-byte rows, hot buffer {hot}", size=9)
            axes.set_xlabel("batch", size=8)
            axes.set_ylabel("misses per request", size=8)
            axes.tick_params(labelsize=8)
    _title(figure, f"Swap-in, {origin.title(bench.raw)}: time of {bench.baseline} over time of the plugin's")
    return figure


def as_svg(figure: Any, salt: str) -> str:
    """For the page: no fonts, no references, colours by variable. `salt` keeps ids of two pictures apart."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)
    svg = re.sub(r' (?:width|height)="[0-9.]+pt"| xmlns(?::xlink)?="[^"]*"| version="1.1"', "", svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    for number, colour in enumerate(COLOURS):
        svg = svg.replace(colour, f"var(--line{number})")
    return re.sub(r"font: ([0-9.]+)px[^;\"]*", r"font-size: \1px; font-family: inherit", svg)


def as_png(figure: Any) -> bytes:
    """For a file of its own."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=160, facecolor="white")
    return picture.getvalue()


def single(bench: Bench, draw: Draw, row: int, hot: int) -> Any:
    """A figure of one row size, for the page: wide enough for a phone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.3, 3.6), layout="constrained")
    draw(bench, row, hot, figure.add_subplot())
    return figure


def panels(bench: Bench, draw: Draw, what: str) -> Any:
    """A figure of all row sizes, for PNG."""
    from matplotlib.figure import Figure

    rows, hot = bench.axis("row_bytes"), bench.axis("hot")[0]
    figure = Figure(figsize=(4.3 * len(rows), 4.0), layout="constrained")
    for row, axes in zip(rows, figure.subplots(1, len(rows), squeeze=False)[0], strict=True):
        draw(bench, row, hot, axes)
        axes.set_title(f"{row}-byte rows", size=TEXT, pad=42)
    dashed = "; dashed: best of SGLang's" if bench.upstream else ""
    _title(figure, f"Swap-in, {what}, {origin.title(bench.raw)}, hot buffer {hot}{dashed}")
    return figure


def _title(figure: Any, text: str) -> None:
    """In lines that the figure is wide enough for; a $ is no mathematics."""
    width = int(figure.get_figwidth() * LETTERS)
    figure.suptitle("\n".join(textwrap.wrap(text, width, break_on_hyphens=False)), size=TEXT, parse_math=False)


def _lines(bench: Bench) -> Iterator[tuple[int, str, str]]:
    yield from zip(batches(bench), COLOURS, MARKS, strict=False)


def _scattered(bench: Bench, row: int) -> float:
    return float({str(key): rate for key, rate in bench.raw["scattered_gbps"].items()}[str(row)])


def _finish(bench: Bench, axes: Any) -> None:
    axes.set_xscale("log", base=2)
    missing = [misses for misses in bench.axis("misses") if misses]
    ticks = [m for m, larger in zip(missing, [*missing[1:], 10 * missing[-1]], strict=True) if larger > 2.2 * m]
    axes.set_xticks(ticks, ticks)
    axes.minorticks_off()
    axes.set_xlabel("misses per request")
    for spine in axes.spines.values():
        spine.set_color(INK)
    axes.tick_params(colors=INK, labelsize=TEXT)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=INK, size=TEXT)
    axes.grid(color=INK, alpha=0.15)
    handles, labels = axes.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    measured = {_batch(bench, batch): named.pop(_batch(bench, batch)) for batch in batches(bench)}
    if bench.upstream:
        (measured["SGLang"],) = axes.plot([], [], color=INK, lw=1, ls="--")
    axes.add_artist(_legend(axes, named, height=1.0))
    _legend(axes, measured, height=1.085)  # the last one is what the layout makes room for


def _legend(axes: Any, named: Mapping[str, Any], height: float) -> Any:
    """A row above the axes."""
    return axes.legend(
        list(named.values()),
        list(named),
        fontsize=TEXT,
        frameon=False,
        labelcolor=INK,
        ncols=len(named),
        loc="lower center",
        bbox_to_anchor=(0.47, height),
        columnspacing=0.9,
        handlelength=1.5,
        handletextpad=0.3,
        borderaxespad=0.1,
    )


def _batch(bench: Bench, batch: int) -> str:
    """A legend's row begins with what it lists."""
    return f"batch {batch}" if batch == batches(bench)[0] else str(batch)
