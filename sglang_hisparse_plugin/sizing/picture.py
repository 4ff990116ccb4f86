"""Concurrency against context length, with and without HiSparse."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from .. import files
from .shapes import SizingError

# Of the Okabe-Ito palette: told apart with any kind of colour vision; the marks differ, too.
LINES = (("hisparse", "with HiSparse", "#0072B2", "o"), ("without", "without", "#D55E00", "s"))


def draw(report: dict[str, Any], file: Path) -> None:
    """Write a PNG or SVG.

    Raises:
        SizingError: matplotlib is missing, the suffix is neither, or the file cannot be written.
    """
    if file.suffix not in (".png", ".svg"):
        raise SizingError(f"--plot {file}: give a name that ends in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SizingError(f"--plot needs matplotlib ({error}): pip install 'sglang-hisparse-plugin[report]'") from error
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    rows = report["contexts"]
    for key, label, colour, mark in LINES:
        points = [(row["prompt"], row[key]) for row in rows if row[key]]
        axes.plot(*zip(*points, strict=True) if points else ((), ()), marker=mark, color=colour, label=label)
        for x, y in points:
            above = key == "hisparse"
            axes.annotate(
                str(y), (x, y), (0, 6 if above else -13), textcoords="offset points", ha="center", color=colour, size=8
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([row["prompt"] for row in rows], [_short(row["prompt"]) for row in rows], rotation=45)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(y=0.12)
    axes.set_xlabel(f"prompt, tokens (and {report['output']} of answer)")
    axes.set_ylabel("requests at once")
    axes.set_title(
        f"{report['model']['name']}, {report['kv_dtype']} KV, SGLang {report['release']}, "
        f"{report['tp']} TP x {report['dp']} DP",
        size=10,
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        picture = io.BytesIO()
        figure.savefig(picture, format=file.suffix[1:], dpi=150)
        files.write(file, picture.getvalue())
    except OSError as error:
        raise SizingError(f"cannot write {file}: {error.strerror}") from error


def _short(tokens: int) -> str:
    return f"{tokens // 1024}Ki" if tokens % 1024 == 0 else str(tokens)
