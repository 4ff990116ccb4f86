"""Writes a report: the page, the pictures and the JSON it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import page, plots
from .data import Bench, Engine, ReportError


def write(bench: Bench, engine: Engine | None, folder: Path) -> Path:
    """Write ``index.html``, ``heat.png``, ``gbps.png``, ``time.png``, ``bench.json`` and ``engine.json`` to `folder`.

    Returns:
        The page.

    Raises:
        ReportError: matplotlib is missing, or the folder cannot be written to.
    """
    plots.available()
    html = page.render(bench, engine)
    make_folder(folder)
    try:
        (folder / "index.html").write_text(html, "utf-8")
        plots.save(plots.heat(bench), folder / "heat.png")
        plots.save(plots.panels(bench, plots.rates, "GB/s"), folder / "gbps.png")
        plots.save(plots.panels(bench, plots.times, "time of a call"), folder / "time.png")
        _save(bench.raw, folder / "bench.json")
        if engine:
            _save({**engine.about, "rows": engine.rows}, folder / "engine.json")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder / "index.html"


def make_folder(folder: Path) -> None:
    """Make it, and its parents.

    Raises:
        ReportError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> ReportError:
    return ReportError(f"cannot write to {folder}: {error.strerror}; name another folder")


def _save(report: Any, file: Path) -> None:
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
