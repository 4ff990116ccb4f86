"""Writes a report: the page, the pictures and the JSON it was made of."""

from __future__ import annotations

from pathlib import Path

from .. import files
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
    parts = {
        "index.html": page.render(bench, engine).encode(),
        "heat.png": plots.as_png(plots.heat(bench)),
        "gbps.png": plots.as_png(plots.panels(bench, plots.rates, "GB/s")),
        "time.png": plots.as_png(plots.panels(bench, plots.times, "time of a call")),
        "bench.json": files.as_json(bench.raw),
    }
    if engine:
        parts["engine.json"] = files.as_json({**engine.about, "rows": engine.rows})
    make_folder(folder)
    try:
        for name, data in parts.items():
            files.write(folder / name, data)
        if not engine:
            (folder / "engine.json").unlink(missing_ok=True)  # of an earlier report
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
