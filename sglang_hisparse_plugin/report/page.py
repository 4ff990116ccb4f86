"""The page: one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from . import origin, plots
from .data import OURS, Bench, Engine, spell

DARKEST = 0.55  # of a heat map's colour, so that text stays readable on it, light and dark


def render(bench: Bench, engine: Engine | None) -> str:
    """The whole file."""
    hot = bench.axis("hot")[0]
    drawn = ", ".join(map(str, plots.batches(bench)))
    dashed = " Dashed: the best of SGLang's kernels, for the batch of that colour." if bench.upstream else ""
    others = [size for size in bench.axis("hot") if size != hot]
    elsewhere = (
        f" Hot buffer {hot}; {', '.join(map(str, others))} is in the tables." if others else f" Hot buffer {hot}."
    )
    return Template((files(__package__) / "page.html").read_text("utf-8")).substitute(
        title=escape(f"Swap-in on {origin.facts(bench.raw)['device']}"),
        about=escape(_about(bench)),
        note=f'<p class="soft">Note: {escape(str(bench.raw["note"]))}.</p>' if bench.raw.get("note") else "",
        summary=_summary(bench),
        baseline=escape(bench.baseline),
        legend=escape(_legend(bench)),
        heat="\n".join(_heat(bench, row, size) for size in bench.axis("hot") for row in bench.axis("row_bytes")),
        rates_legend=escape(
            f"Batches of {drawn}.{dashed} Horizontal lines: one large copy by the copy engine (dotted), and scattered "
            f"rows read from a ready plan (solid), both measured in the same run.{elsewhere}"
        ),
        rates=_figures(bench, plots.rates, hot, "GB/s against misses per request"),
        times_legend=escape(
            f"Microseconds of one call, that is of one layer in one step; both axes are logarithmic. Batches of {drawn}"
            f".{dashed} Dotted: the bound, that is 3 for the plan, and if anything misses 2 for a round trip and what "
            f"the link needs for the bytes.{elsewhere}"
        ),
        times=_figures(bench, plots.times, hot, "microseconds against misses per request"),
        engine=_engine(engine) if engine else "",
        cells_summary=f"{len(bench.cells)} cells: microseconds (median, lowest and highest), GB/s, over the bound",
        cells=_cells(bench),
        facts=_facts(bench),
    )


def _about(bench: Bench) -> str:
    compared = f"compared with {' / '.join(bench.upstream)}" if bench.upstream else "no SGLang measured"
    return f"Measured with {origin.sentence(bench.raw)}; {compared}"


def _summary(bench: Bench) -> str:
    found = bench.summary()
    shown = [
        (f"{found['median']:.2f}x", f"median of {found['cells']} cells: {bench.baseline} over the plugin's"),
        (f"{found['least']:.2f}x - {found['greatest']:.2f}x", "least and greatest of them"),
        (str(found["slower"]), "cells in which the plugin's is slower"),
        (f"{found['over_bound']:.2f}x", "of the bound, median of the plugin's"),
        (f"{bench.raw['copy_engine_gbps']:.1f} GB/s", "copy engine, host to device"),
    ]
    items = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for value, label in shown)
    return f'<dl class="figures">{items}</dl>'


def _legend(bench: Bench) -> str:
    better = "Above 1 (blue) the plugin's kernel is faster, below 1 (orange, slanted) slower."
    if bench.upstream:
        return f"{better} Columns: batch; rows: misses per request in one step."
    return (
        "No SGLang was installed where this was measured, so the grid shows the bound over the plugin's time: 1 is "
        "what the chip and the link allow. Columns: batch; rows: misses per request in one step."
    )


def _heat(bench: Bench, row: int, hot: int) -> str:
    batches, greatest = bench.axis("batch"), bench.summary()["greatest"]
    head = "".join(f'<th scope="col">{batch}</th>' for batch in batches)
    lines = []
    for misses in bench.axis("misses"):
        cells = "".join(_shade(bench.ratio((batch, misses, row, hot)), greatest) for batch in batches)
        lines.append(f'<tr><th scope="row">{misses}</th>{cells}</tr>')
    return (
        f'<table class="heat"><caption>{row}-byte rows, hot buffer {hot}</caption>'
        f'<thead><tr><th scope="col">misses</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _shade(ratio: float, greatest: float) -> str:
    share = (ratio - 1) / max(greatest - 1, 0.1) if ratio >= 1 else (1 - ratio) / 0.2
    strength = DARKEST * (min(share, 1) ** 0.6 if ratio >= 1 else 0.3 + 0.7 * min(share, 1))
    return f'<td class="{"gain" if ratio >= 1 else "loss"}" style="--a:{strength:.2f}">{spell(ratio)}</td>'


def _figures(bench: Bench, draw: plots.Draw, hot: int, what: str) -> str:
    found = []
    for row in bench.axis("row_bytes"):
        svg = plots.as_svg(plots.single(bench, draw, row, hot), f"{what} {row}")
        label = f"{what}, {row}-byte rows, hot buffer {hot}; the numbers are in the table of every cell"
        svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
        found.append(f"<figure><figcaption>{row}-byte rows</figcaption>{svg}</figure>")
    return "\n".join(found)


def _cells(bench: Bench) -> str:
    kernels = list(next(iter(bench.cells.values()))["us"])
    head = ["batch", "misses", "row bytes", "hot buffer", "bound, us"]
    for kernel in kernels:
        head += [f"{kernel}, us", "spread", "GB/s"]
    rows = []
    for point, cell in bench.cells.items():
        line = [*map(str, point), f"{cell['bound_us']}"]
        for kernel in kernels:
            low, high = cell["spread"][kernel]
            line += [str(cell["us"][kernel]), f"{low} - {high}", str(cell["gbps"][kernel]) if cell["misses"] else ""]
        rows.append([*line, str(cell["over_bound"][OURS])])
    return _table([*head, f"{OURS} over bound"], rows)


def _engine(engine: Engine) -> str:
    rows = [[origin.shown(row.get(key)) for key in engine.columns] for row in engine.rows]
    about = "; ".join(f"{_spelled(key)}: {origin.shown(value)}" for key, value in engine.about.items() if _plain(value))
    words = [n for n, key in enumerate(engine.columns) if any(isinstance(row.get(key), str) for row in engine.rows)]
    table = _table(list(engine.columns.values()), rows, left=words)
    scrolling = f'<div class="wide" role="region" aria-label="End to end" tabindex="0">{table}</div>'
    return f'<h2>End to end</h2>\n<p class="soft">{escape(about)}</p>\n{scrolling}'


def _facts(bench: Bench) -> str:
    others = {key: value for key, value in bench.raw.items() if key not in ("note", *origin.LABELS) and _plain(value)}
    facts = [(origin.LABELS[key], value) for key, value in origin.facts(bench.raw).items()]
    facts += [(_spelled(key), origin.shown(value)) for key, value in others.items()]
    facts += [(f"scattered rows of {row} bytes, GB/s", rate) for row, rate in origin.ceilings(bench.raw).items()]
    lines = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in facts)
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in ("bench.json", "heat.png", "gbps.png", "time.png"))
    return f'<table class="facts"><tbody>{lines}</tbody></table>\n<p>Beside this page: {links}.</p>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = ()) -> str:
    side = dict.fromkeys(left, ' class="left"')
    titles = "".join(f'<th scope="col"{side.get(n, "")}>{escape(title)}</th>' for n, title in enumerate(head))
    lines = (
        "<tr>" + "".join(f"<td{side.get(n, '')}>{escape(text)}</td>" for n, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _spelled(key: str) -> str:
    return re.sub(r" gbps$", ", GB/s", key.replace("_", " "))


def _plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))
