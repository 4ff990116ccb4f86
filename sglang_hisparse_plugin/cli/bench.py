"""``bench``: times the swap-in kernel beside the installed release's, against the link as measured in the same run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from .. import __version__, files, lines, provenance
from ..kernels.build import source_digest
from ..report import Bench, Engine, ReportError, plots, read_bench, read_engine, text, write
from ..report.data import bench as from_report
from ..report.origin import facts
from ..report.write import make_folder

if TYPE_CHECKING:
    import torch

OURS, COUNTING = "plugin", "plugin, counting"
REPLAYS = 9  # that are timed
STDOUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.epilog = "Exit codes: 0 measured, or shown; 2 there is no GPU to measure on, or the input is wrong."
    parser.add_argument(
        "--json", type=Path, nargs="?", const=STDOUT, metavar="FILE", help="print the results as JSON, or save to FILE"
    )
    parser.add_argument("--quick", action="store_true", help="nine cells instead of 252")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write an HTML page, pictures and the JSON to DIR")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="measure nothing, show FILE of --json")
    parser.add_argument("--engine", type=Path, metavar="FILE", help="add a table of an end-to-end run to the report")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: measured, or shown; 2: there is nothing to measure on or to show, or the input is wrong."""
    try:
        engine = _prepare(options)
        bench = _read(options.source) if options.source else _measure(options)
        _show(options, bench, engine)
    except ReportError as error:
        lines.complain("bench", str(error))
        if options.json == STDOUT:
            print(json.dumps({"error": str(error)}))
        return 2
    return 0


def _prepare(options: argparse.Namespace) -> Engine | None:
    """Everything but the results; a fault in it is better known before minutes on a GPU."""
    if options.engine and not options.report:
        raise ReportError("--engine is for a report: name its folder with --report")
    if options.quick and options.source:
        raise ReportError("--quick is for a measurement, and --from measures nothing: leave one of them out")
    if options.json and options.json != STDOUT:
        with _writing(options.json):
            files.check_writable(options.json)
        if options.report and os.path.realpath(options.report) == os.path.realpath(options.json):
            raise ReportError(f"{options.json} cannot be both the JSON and the report's folder: name another")
    if not options.report:
        return None
    plots.available()
    return read_engine(options.engine) if options.engine else None


def _read(file: Path) -> Bench:
    """A record, and a line on stderr if its times need not be those of the installed kernel."""
    bench, installed = read_bench(file), source_digest()
    sources = facts(bench.raw)["sources"]
    if sources != installed:
        lines.complain(
            "bench",
            f"{file} is of kernel sources {sources}, and installed are {installed}: its times need not hold for these; "
            "to measure them, leave --from out",
        )
    return bench


def _show(options: argparse.Namespace, bench: Bench, engine: Engine | None) -> None:
    """The results, everywhere they were asked for: files first, for who reads stdout may leave before its end."""
    try:
        page = _save(options, bench, engine)
    except ReportError:
        with contextlib.suppress(BrokenPipeError, SystemExit):  # a reader that left must not hide the fault
            _print(options, bench)
        raise
    _print(options, bench)
    out = sys.stderr if options.json == STDOUT else sys.stdout
    if page and out:
        print(f"Report: {page}", file=out)


def _save(options: argparse.Namespace, bench: Bench, engine: Engine | None) -> Path | None:
    """Write the files; returns the report's page."""
    if options.json and options.json != STDOUT:
        with _writing(options.json):
            files.write(options.json, files.as_json(bench.raw))
    return write(bench, engine, options.report) if options.report else None


def _print(options: argparse.Namespace, bench: Bench) -> None:
    if options.json == STDOUT:
        print(json.dumps(bench.raw, indent=1))
    elif not options.source or not options.report:
        text.show(bench, Console(width=lines.width()))


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"cannot write to {file}: {error.strerror}; name another file with --json") from error


def _measure(options: argparse.Namespace) -> Bench:
    try:
        import torch
    except ImportError as error:
        raise ReportError(f"{error}; install the torch that your SGLang needs") from error
    if not torch.cuda.is_available():
        raise ReportError(
            "no CUDA device; the kernels can only be timed on one. --from FILE shows an earlier run, and with "
            "--report DIR makes a report of it"
        )
    if options.report:
        make_folder(options.report)
    return from_report(_timed(options.quick, torch.device("cuda", torch.cuda.current_device())))


def _timed(quick: bool, device: torch.device) -> dict[str, Any]:
    """A report as a dictionary; progress goes to stderr."""
    from ..kernels import bench, build

    console = Console(stderr=True)
    try:
        ours = bench.plugin_kernel()
        kernels = {OURS: ours, COUNTING: bench.counting(ours, device), **bench.installed_kernel()}
    except build.CompilerMissing as error:
        raise ReportError(str(error)) from error
    cells = bench.grid(quick)
    with console.status("filling host memory and measuring the link"):
        arena = bench.Arena(cells, device)
        machine = bench.describe_machine(arena, sorted({cell.row_bytes for cell in cells}))
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(cells))
        for result in bench.measure(cells, kernels, replays=REPLAYS, arena=arena):
            results.append(result)
            progress.advance(task)
    with console.status("measuring the link again"):
        machine = bench.measure_link_again(arena, machine)
    return {
        "plugin": __version__,
        "commit": provenance.commit(),
        "sources": source_digest(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **machine,
        "top_k": bench.TOP_K,
        "context": bench.CONTEXT,
        "steps": bench.STEPS,
        "replays": REPLAYS,
        "counting_cost_percent": bench.counting_cost_percent(results, OURS, COUNTING),
        "cells": [bench.as_row(result, machine) for result in results],
    }
