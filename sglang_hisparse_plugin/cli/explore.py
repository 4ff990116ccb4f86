"""``explore``: what another hot buffer would do, from a trace of what a running server selects."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..sizing import kernel_model

if TYPE_CHECKING:
    from ..observe.tracefile import Trace

FACTORS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)  #: of the recorded hot buffer, when no sizes are given
REQUEST = "record"  #: the file by which a server is asked
GRACE = 30  #: seconds beyond those asked for until the server must have delivered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``explore``."""
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="a recorded trace (*.hisparse)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="first record one; the folder of the server's --hisparse-plugin-trace",
    )
    parser.add_argument("--seconds", type=float, default=10, help="how long to record (default: 10)")
    parser.add_argument("--mib", type=float, default=256, help="size at which to stop recording (default: 256)")
    parser.add_argument("--sizes", metavar="N[,N...]", help="hot buffers to try (default: 0.5 to 4 times the recorded)")
    parser.add_argument(
        "--warm-up", type=int, default=8, metavar="N", help="first steps of a request not to count (default: 8)"
    )
    parser.add_argument("--batch", type=int, default=1, help="requests per step, for the expected time (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: a curve was printed; 2: there is no trace, or a size makes no sense."""
    console = Console(stderr=options.json)
    try:
        report = _explore(options, console)
    except ImportError as error:
        print(f"sglang-hisparse explore: {error}; install numpy, which every SGLang has", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"sglang-hisparse explore: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(console, report)
    return 0


def _explore(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from ..observe import replay, tracefile

    if (options.trace is None) == (options.record is None):
        raise ValueError("give a trace, or --record DIR to have one recorded")
    if options.batch < 1 or options.warm_up < 0 or options.seconds <= 0 or options.mib <= 0:
        raise ValueError("--batch, --seconds and --mib must be positive, --warm-up not negative")
    path = options.trace or _record(options.record, options.seconds, options.mib, console)
    trace = tracefile.read(path)
    sizes = _sizes(options.sizes, trace)
    if min(sizes) < trace.top_k:
        raise ValueError(f"a hot buffer of {min(sizes)} cannot hold the top-k of {trace.top_k}: try larger --sizes")
    progress = track(sizes, "replaying", console=console, transient=True, disable=not console.is_terminal)
    outcomes = [replay.replay(trace, size, options.warm_up) for size in progress]
    if not outcomes[0].calls:
        raise ValueError(f"no request in {path} has more than --warm-up {options.warm_up} steps")
    return _report(path, trace, outcomes, options)


def _record(folder: Path, seconds: float, mib: float, console: Console) -> Path:
    """Ask a server for a trace and wait for the file."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: start the server with --hisparse-plugin-trace {folder}")
    before = set(folder.glob("*.hisparse"))
    asked = folder / f"{REQUEST}.new"
    asked.write_text(json.dumps({"seconds": seconds, "mib": mib}))
    asked.replace(folder / REQUEST)
    deadline = time.monotonic() + seconds + GRACE
    with console.status(f"recording for {seconds:g} s"):
        while time.monotonic() < deadline:
            if new := set(folder.glob("*.hisparse")) - before:
                return max(new)
            time.sleep(0.2)
    raise TimeoutError(
        f"no trace appeared in {folder}: is a server running with --hisparse-plugin-trace {folder}, and does its log "
        "say something about a HiSparse trace?"
    )


def _sizes(text: str | None, trace: Trace) -> list[int]:
    if text is None:
        found = {int(trace.hot_buffer * factor) for factor in FACTORS}
        return sorted(size for size in found if size >= trace.top_k)
    try:
        return sorted({int(size) for size in text.split(",")} | {trace.hot_buffer})
    except ValueError:
        raise ValueError(f"--sizes: '{text}' is no list of numbers such as 4096,6144") from None


def _report(path: Path, trace: Trace, outcomes: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    model = kernel_model.stored()
    curve = []
    for outcome in outcomes:
        misses = outcome.misses_per_call
        us = model.call_us(kernel_model.OURS, options.batch, misses, trace.item_bytes, outcome.hot_buffer)
        curve.append(
            {
                "hot_buffer": outcome.hot_buffer,
                "hit_rate": outcome.hit_rate,
                "misses_per_call": misses,
                "misses": outcome.misses,
                "hits": outcome.hits,
                "expected_us_per_step": us * trace.model_layers,
            }
        )
    return {
        "trace": str(path),
        "recorded_hot_buffer": trace.hot_buffer,
        "top_k": trace.top_k,
        "row_bytes": trace.item_bytes,
        "layers": list(trace.layers),
        "model_layers": trace.model_layers,
        "calls": outcomes[0].calls,
        "batch": options.batch,
        "kernel_times": model.source,
        "device": model.device,
        "curve": curve,
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"{report['trace']}: {report['calls']} selections of {report['top_k']} tokens, layers "
        f"{', '.join(map(str, report['layers']))}; rows of {report['row_bytes']} bytes",
        highlight=False,
        soft_wrap=True,
    )
    base = next((p for p in report["curve"] if p["hot_buffer"] == report["recorded_hot_buffer"]), None)
    table = Table("hot buffer", "hit rate", "misses per request and layer", "against now", "ms per step", box=None)
    for point in report["curve"]:
        against = ""
        if base and base["misses"]:
            against = "now" if point is base else f"{point['misses'] / base['misses'] - 1:+.0%}"
        cells = (
            f"{point['hit_rate']:.2%}",
            f"{point['misses_per_call']:.1f}",
            against,
            f"{point['expected_us_per_step'] / 1e3:.2f}",
        )
        table.add_row(str(point["hot_buffer"]), *cells)
    console.print(table)
    console.print(
        f"ms per step: swap-in of all {report['model_layers']} layers at batch {report['batch']}, expected from times "
        f"measured on {report['device']}; a hot buffer beyond those measured is taken for the nearest.",
        highlight=False,
        soft_wrap=True,
    )
