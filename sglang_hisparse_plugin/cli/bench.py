"""``bench``: times the swap-in kernel beside the installed release's, against the link as measured in the same run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .. import __version__
from ..report import Bench, Engine, ReportError, plots, read_bench, read_engine, write
from ..report.data import bench as from_report
from ..report.write import make_folder

OURS, COUNTING = "plugin", "plugin, counting"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results to FILE as well")
    parser.add_argument("--quick", action="store_true", help="nine cells instead of 252")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write an HTML page, pictures and the JSON to DIR")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="measure nothing, take FILE of --json")
    parser.add_argument("--engine", type=Path, metavar="FILE", help="add a table of an end-to-end run to the report")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: measured, or reported; 2: there is nothing to measure on or to report, or the input is wrong."""
    if (options.source or options.engine) and not options.report:
        print(
            "sglang-hisparse bench: --from and --engine are for a report: name its folder with --report",
            file=sys.stderr,
        )
        return 2
    try:
        engine = _prepare(options)
        if options.source:
            return _write_report(read_bench(options.source), engine, options.report)
        return _measure(options, engine)
    except ReportError as error:
        print(f"sglang-hisparse bench: {error}", file=sys.stderr)
        return 2


def _prepare(options: argparse.Namespace) -> Engine | None:
    """What a report needs besides the measurement; a fault in it is better known before minutes on a GPU."""
    if not options.report:
        return None
    plots.available()
    return read_engine(options.engine) if options.engine else None


def _write_report(bench: Bench, engine: Engine | None, folder: Path) -> int:
    print(f"Report: {write(bench, engine, folder)}")
    return 0


def _measure(options: argparse.Namespace, engine: Engine | None) -> int:
    try:
        import torch
    except ImportError as error:
        print(f"sglang-hisparse bench: {error}; install the torch that your SGLang needs", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            "sglang-hisparse bench: no CUDA device; the kernels can only be timed on one "
            "(--from FILE --report DIR makes a report of an earlier run)",
            file=sys.stderr,
        )
        return 2
    from ..kernels import bench, build

    console = Console()
    try:
        ours, device = bench.plugin_kernel(), torch.device("cuda", torch.cuda.current_device())
        kernels = {OURS: ours, COUNTING: bench.counting(ours, device), **bench.installed_kernel()}
    except build.CompilerMissing as error:
        print(f"sglang-hisparse bench: {error}", file=sys.stderr)
        return 2
    if options.report:
        make_folder(options.report)
    cells = bench.grid(options.quick)
    with console.status("filling host memory and measuring the link"):
        arena = bench.Arena(cells, device)
        machine = bench.describe_machine(arena, sorted({cell.row_bytes for cell in cells}))
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("cells", total=len(cells))
        for result in bench.measure(cells, kernels, arena=arena):
            results.append(result)
            progress.advance(task)
    report = {
        "plugin": __version__,
        **machine,
        "counting_cost_percent": bench.counting_cost_percent(results, OURS, COUNTING),
        "cells": [bench.as_row(result, machine) for result in results],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(console, report, list(kernels))
    return _write_report(from_report(report), engine, options.report) if options.report else 0


def _print(console: Console, report: dict[str, Any], kernels: list[str]) -> None:
    rates = ", ".join(f"{rate:.1f} at {row} B" for row, rate in report["scattered_gbps"].items())
    console.print(
        f"{report['device']}, torch {report['torch']}, CUDA {report['cuda']}. Host to device: copy engine "
        f"{report['copy_engine_gbps']:.1f} GB/s; scattered rows, GB/s: {rates}",
        highlight=False,
        soft_wrap=True,
    )
    costs = ", ".join(f"{cost:+.2f}% of {kind}" for kind, cost in report["counting_cost_percent"].items())
    console.print(f"Counters on cost {costs} (medians)")
    others = [name for name in kernels if name not in (OURS, COUNTING)]
    table = Table("batch", "misses", "row B", "hot", f"{OURS} us", "spread", "GB/s", "% link", "/ bound", box=None)
    for name in others:
        table.add_column(f"{name} us")
        table.add_column("speedup")
    for row in report["cells"]:
        ours = row["us"][OURS]
        low, high = row["spread"][OURS]
        cells = [f"{ours:.1f}", f"{low:.1f}-{high:.1f}"]
        cells += [f"{row['gbps'][OURS]:.1f}", f"{row['link_percent'][OURS]:.0f}"] if row["misses"] else ["", ""]
        cells.append(f"{row['over_bound'][OURS]:.2f}")
        for name in others:
            cells += [f"{row['us'][name]:.1f}", f"{row['us'][name] / ours:.2f}"]
        table.add_row(*(str(row[key]) for key in ("batch", "misses", "row_bytes", "hot")), *cells)
    console.print(table)
