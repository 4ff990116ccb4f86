"""``explore``: what another hot buffer would do, from a trace of what a running server selects."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..observe.request import Request
from ..sizing import kernel_model

if TYPE_CHECKING:
    from ..observe.tracefile import Trace

FACTORS = (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4)  #: of the recorded hot buffer, when no sizes are given
LARGEST_BATCH = 65536  #: requests at once that any server could have


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``explore``."""
    parser.add_argument(
        "traces",
        nargs="*",
        type=Path,
        metavar="TRACE",
        help="recorded traces (*.hisparse) of one server, taken together",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="first record one; the folder of the server's --hisparse-plugin-trace",
    )
    parser.add_argument(
        "--seconds", type=float, default=10, help="how long to record, up to 3600 (default: 10); Ctrl-C ends it earlier"
    )
    parser.add_argument(
        "--mib", type=float, default=256, help="size at which to stop recording, up to 16384 (default: 256)"
    )
    parser.add_argument(
        "--sizes", metavar="N[,N...]", help="hot buffers to try, up to 32767 (default: 0.5 to 4 times the recorded)"
    )
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
        return _failed(f"{error}; install numpy, which every SGLang has", options.json)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        remedy = "; name trace files, such as DIR/trace-*.hisparse, or record one with --record DIR"
        return _failed(why + (remedy if error.filename else ""), options.json)
    except ValueError as error:
        return _failed(str(error), options.json)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _print(console, report)
    return 0


def _failed(why: str, as_json: bool) -> int:
    print(f"sglang-hisparse explore: {why}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": why}))
    return 2


def _explore(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    from ..observe import asking, replay, tracefile

    if bool(options.traces) == (options.record is not None):
        raise ValueError("give traces, or --record DIR to have one recorded")
    if not 0 < options.batch <= LARGEST_BATCH or options.warm_up < 0:
        raise ValueError(f"--batch must be 1 to {LARGEST_BATCH}, --warm-up not negative")
    sizes = _sizes(options.sizes, tracefile.LARGEST_HOT_BUFFER)
    wanted = Request(options.seconds, options.mib)
    paths = list(dict.fromkeys(options.traces)) or asking.record(options.record, wanted, console)
    traces = [tracefile.read(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        if trace.shape != traces[0].shape:
            raise ValueError(f"{path} and {paths[0]} are of servers with other models or hot buffers: give one a time")
    one = traces[0]
    sizes = sorted({*sizes, one.hot_buffer}) if sizes else _around(one, tracefile.LARGEST_HOT_BUFFER)
    if min(sizes) < one.top_k:
        raise ValueError(f"a hot buffer of {min(sizes)} cannot hold the top-k of {one.top_k}: try larger --sizes")
    progress = track(sizes, "replaying", console=console, transient=True, disable=not console.is_terminal)
    outcomes = [replay.replay(traces, size, options.warm_up) for size in progress]
    if not outcomes[0].calls:
        raise ValueError(f"no request in {paths[0]} has more than --warm-up {options.warm_up} steps")
    return _report(paths, traces, outcomes, options)


def _sizes(text: str | None, most: int) -> list[int]:
    """Those asked for; none for none."""
    try:
        sizes = [int(size) for size in text.split(",")] if text is not None else []
    except ValueError:
        raise ValueError(f"--sizes: '{text}' is no list of numbers such as 4096,6144") from None
    if wrong := [size for size in sizes if not 0 < size <= most]:
        raise ValueError(f"--sizes: {wrong[0]} is no hot buffer: SGLang numbers its slots in int16, so 1 to {most}")
    return sizes


def _around(trace: Trace, most: int) -> list[int]:
    found = {int(trace.hot_buffer * factor) for factor in FACTORS}
    return sorted(size for size in found if trace.top_k <= size <= most)


def _report(paths: list[Path], traces: list[Trace], outcomes: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    trace = traces[0]
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
        "traces": [str(path) for path in paths],
        "recorded_hot_buffer": trace.hot_buffer,
        "top_k": trace.top_k,
        "row_bytes": trace.item_bytes,
        "layers": list(trace.layers),
        "model_layers": trace.model_layers,
        "calls": outcomes[0].calls,
        "lost": sum(t.lost for t in traces),
        "batch": options.batch,
        "kernel_times": model.source,
        "device": model.device,
        "curve": curve,
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    first, *more = report["traces"]
    several = f" and {len(more)} more" if more else ""
    console.print(
        f"{first}{several}: {report['calls']} selections of {report['top_k']} tokens, layers "
        f"{', '.join(map(str, report['layers']))}; rows of {report['row_bytes']} bytes",
        highlight=False,
        soft_wrap=True,
    )
    if report["lost"]:
        console.print(
            f"{report['lost']} selections were overwritten before they could be read; the steps after such a gap count "
            "too many misses. Record fewer layers, or under less load.",
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
