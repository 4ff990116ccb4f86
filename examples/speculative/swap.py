"""Times the swap-in of a verification: the plugin's op once for each query, the same once for all, SGLang's own kernel.

    python swap.py --sglang DIR --json FILE       # DIR: an unpacked wheel of SGLang 0.5.22 or later; two minutes

A timed run is one CUDA graph of verifications of one layer. Tables are put back before each replay, outside the timed
region. Before a way is timed it answers all of these verifications once: each row that it names must hold what its
token's row holds, and each request must have copied what the cell says. One that fails is no time but an error.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import swap_jit
import torch
from rich.console import Console
from rich.table import Table
from swap_scene import Calls, Cell, Load, Union, Upstream, Way, host_memory

from sglang_hisparse_plugin import installation
from sglang_hisparse_plugin.demo import results
from sglang_hisparse_plugin.kernels import bench, build

STEPS = 8  # verifications in a graph


def cells(options: argparse.Namespace) -> list[Cell]:
    """The grid, ordered by what must be compiled and allocated for it."""
    return [
        Cell(batch, drafts, misses, row)
        for drafts in options.drafts
        for row in options.rows
        for batch in options.batch
        for misses in options.misses
    ]


def compiled(grid: list[Cell], root: Path | None) -> dict[int, Any]:
    """Compile everything that the grid needs, at once; SGLang's modules by number of drafts."""
    major = torch.cuda.get_device_capability()[0]
    spec: dict[int, Any] = {}
    jobs: list[Any] = []
    rows = tuple(sorted({cell.row_bytes for cell in grid}))
    for drafts, top_k, hot in {(cell.drafts, cell.top_k, cell.hot) for cell in grid}:
        jobs += [functools.partial(build.swap_in_module, entries, hot, major) for entries in (top_k, hot)]
        if root:
            jobs.append(lambda n=drafts, k=top_k, h=hot: spec.update({n: swap_jit.upstream_spec(root, n, k, h, rows)}))
    swap_jit.in_parallel(jobs)
    return spec


def ways(load: Load, spec: dict[int, Any]) -> dict[str, Callable[[], Way]]:
    """What makes each, by the names they have in the record."""
    found: dict[str, Callable[[], Way]] = {
        "plugin, a call for each query": lambda: Calls(load),
        "plugin, one call": lambda: Union(load),
    }
    if load.cell.drafts in spec:
        kernel = getattr(spec[load.cell.drafts], f"spec_{load.cell.row_bytes}")
        found["sglang"] = lambda: type("Upstream", (Upstream,), {"kernel": staticmethod(kernel)})(load)
    return found


def measure(grid: list[Cell], spec: dict[int, Any], replays: int) -> Iterator[dict[str, Any]]:
    """A row of the record for each cell. Ways take turns, so that what drifts drifts for all."""
    device = torch.device("cuda", torch.cuda.current_device())
    most = max(cell.batch * cell.context for cell in grid)
    hosts = {row: host_memory(most, row, pinned=True) for row in {cell.row_bytes for cell in grid}}
    for cell in grid:
        tried, wrong = right(ways(Load(cell, STEPS, hosts[cell.row_bytes], device), spec))
        graphs = {name: bench.capture_graph(functools.partial(_all, way), way.reset) for name, way in tried.items()}
        times: dict[str, list[float]] = {name: [] for name in tried}
        for turn in range(replays + 1):
            for name, graph in graphs.items():
                took = bench.time_replay(graph, tried[name].reset)
                if turn:  # the first warms up
                    times[name].append(took * 1e3 / STEPS)
        yield {
            **cell._asdict(),
            "hot": cell.hot,
            "bytes": cell.bytes,
            "us": {name: round(statistics.median(us), 2) for name, us in times.items()},
            "spread": {name: [round(min(us), 2), round(max(us), 2)] for name, us in times.items()},
            "wrong": wrong,
        }


def right(makers: dict[str, Callable[[], Way]]) -> tuple[dict[str, Way], list[str]]:
    """Those whose every answer is right, and what is wrong with the others."""
    good, wrong = {}, []
    for name, make in makers.items():
        try:
            way = make()
            torch.cuda.synchronize()
            way.check()
            good[name] = way
        except RuntimeError as error:
            wrong.append(f"{name}: {str(error).splitlines()[0]}")
    return good, wrong


def _all(way: Way) -> None:
    for selected in way.load.timed:
        way.call(selected)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the rows side by side, in microseconds a verification and layer."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    table = Table("drafts", "row B", "batch", "misses", *names, box=None)
    for row in rows:
        sizes = [str(row[name]) for name in ("drafts", "row_bytes", "batch", "misses")]
        table.add_row(*sizes, *(f"{row['us'][name]:.1f}" if name in row["us"] else "wrong" for name in names))
    console.print(table)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="unpacked wheel; default: SGLang's is not measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there, anew after every cell")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4], metavar="N", help="draft tokens of a request")
    parser.add_argument("--rows", type=int, nargs="+", default=[656, 1152], metavar="BYTES", help="of a row of KV")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="requests")
    parser.add_argument("--misses", type=int, nargs="+", default=[0, 64, 410], metavar="N", help="of a request")
    parser.add_argument("--replays", type=int, default=9, metavar="N", help="of which the median is taken")
    parser.add_argument("--commit", help="for the record, where this is no checkout")
    options = parser.parse_args()
    console = Console(stderr=True)
    if not torch.cuda.is_available():
        console.print("swap.py: no CUDA device; kernels can only be timed on one")
        return 2
    grid = cells(options)
    swap_jit.stand_in()
    with console.status("compiling"):
        spec = compiled(grid, options.sglang)
    machine = results.machine("cuda")
    record = machine | {"commit": options.commit or machine["commit"], "steps": STEPS, "replays": options.replays}
    record |= {"cuda": torch.version.cuda, "sources": build.source_digest()}
    record |= {"sglang": installation.Installation(options.sglang).version if options.sglang else None}
    rows: list[dict[str, Any]] = []
    for row in measure(grid, spec, options.replays):
        rows.append(row)
        console.print(f"{len(rows)}/{len(grid)} {row['us']}", *row["wrong"], highlight=False)
        if options.json:
            options.json.write_text(json.dumps(record | {"cells": rows}, indent=1) + "\n")
    show(rows, Console())
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
