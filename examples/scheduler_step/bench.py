"""Times what SGLang's scheduler does for a decode step under HiSparse, with and without the overlays for its cost.

    python bench.py --release 0.5.12 --json FILE             # a CPU, with the stand-ins of `sglang-hisparse demo`
    PYTHONPATH=DIR python bench.py --device cuda --json FILE # a GPU, where DIR holds sglang; nothing is a stand-in

A step is `check_decode_mem` and `prepare_for_decode` of SGLang's `ScheduleBatch`. As in SGLang's overlapped loop, the
forward pass of the step before is under way meanwhile; on a GPU it keeps the device for `--forward` milliseconds. The
ways take turns, a few steps each. Every pass writes rows known beforehand, and at the end each must be in the host
pool; one spoiled on purpose must be found.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch
from decoding import Decoding, Size
from rich.console import Console
from rich.table import Table

from sglang_hisparse_plugin import __version__, installation, lines, provenance
from sglang_hisparse_plugin.demo import cpu, releases
from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching import engine
from sglang_hisparse_plugin.patching.hooker import WraptHooker
from sglang_hisparse_plugin.patching.outcome import Applied

START = time.perf_counter()
WARM_UP = 3  # steps before timed ones
MEMORY = ("retract-order", "retract-once", "decode-memory")
WAYS = {
    "SGLang": (),
    "index-upload": ("index-upload",),
    "index-upload, decode-memory": ("index-upload", *MEMORY),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--release", action="append", help="on a CPU: fetch and measure this one; may be repeated")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each way")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a turn; three more come before them")
    parser.add_argument("--forward", type=float, nargs="+", default=[0.0, 3.0], help="milliseconds of a pass on a GPU")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--commit", default=provenance.commit(), help="of this code, where no repository tells")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.here or options.device == "cuda":
        records = measured(options)
    else:
        records = (in_process(release, options) for release in options.release or ["0.5.12"])
    wrong = 0
    for record in records:
        wrong += sum(each["wrong_rows"] for each in record["releases"])
        if options.here:
            print(json.dumps(record), flush=True)
        else:
            save(record, options.json)
            show(record["releases"][-1])
    return wrong > 0


def save(record: dict, file: Path | None) -> None:
    """With what the file has of other releases: a run that is cut short leaves what it has."""
    if file:
        with contextlib.suppress(FileNotFoundError):
            new = {each["sglang"] for each in record["releases"]}
            old = [each for each in json.loads(file.read_text("utf-8"))["releases"] if each["sglang"] not in new]
            record = {**record, "releases": old + record["releases"]}
        file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def in_process(release: str, options: argparse.Namespace) -> dict:
    """Of a release, in a process with the stand-ins."""
    counts = ["--batch", *map(str, options.batch), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    counts += ["--commit", options.commit or ""]
    env = cpu.environment(releases.fetch(release)) | {"SGLANG_HISPARSE_PLUGIN": "off"}
    command = [sys.executable, __file__, "--here", *counts]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """The record of this release, again after each batch size, longer each time."""
    os.environ["SGLANG_HISPARSE_PLUGIN"] = "off"  # what is switched on and off here is applied here
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ledger = engine.Ledger()
    say("importing SGLang")
    ways = applied(ledger)
    passes = options.forward if options.device == "cuda" else [0.0]
    steps = len(passes) * options.rounds * (options.steps + WARM_UP) * len(ways) + WARM_UP + len(passes)
    release = {
        "sglang": installation.find().version,
        "overlays": {name: type(outcome).__name__ for name, outcome in ledger.outcomes.items()},
        **{"rows_checked": 0, "wrong_rows": 0, "cells": []},
    }
    kept = []  # to the end: SGLang never takes back the registration of a host pool's memory
    for batch in options.batch:
        say(f"batch {batch}: pools, first steps")
        with torch.inference_mode():
            decoding = Decoding(options.device, batch, Size(64, 128, 200, steps))
            kept.append(decoding)
            for _ in range(WARM_UP):  # compile what is compiled at first use
                decoding.prepare()
                decoding.forward(0)
            say("measuring")
            release["cells"] += [cell(decoding, options, ledger, ways, forward) for forward in passes]
            wrong = decoding.wrong_rows()
            decoding.spoil()
            if decoding.wrong_rows() <= wrong:
                raise AssertionError("a host row that was changed on purpose was not found")
        release["rows_checked"] += decoding.rows
        release["wrong_rows"] += wrong
        yield {**about(options), "releases": [release]}


def about(options: argparse.Namespace) -> dict:
    """What is measured, where and with what."""
    on_gpu = options.device == "cuda"
    aside = (
        " On a CPU host_us is CPU time of the scheduler's thread, without what a stand-in does: the page allocator's "
        "kernel, interpreted, and the copies of the backup."
    )
    return {
        "what": "microseconds on the host for check_decode_mem and prepare_for_decode of a step (host_us), on a GPU "
        "also from one step to the next (period_us): [10th percentile, median, 90th percentile]."
        f"{'' if on_gpu else aside}",
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu: {processor()}",
        "driver": provenance.driver() if on_gpu else None,
        "stand_ins": None if on_gpu else cpu.STAND_INS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plugin": __version__,
        "commit": options.commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "steps_per_way": options.rounds * options.steps,
    }


def say(what: str) -> None:
    """On stderr, with the seconds since the start."""
    print(f"{time.perf_counter() - START:6.1f} s  {what}", file=sys.stderr, flush=True)


def applied(ledger: engine.Ledger) -> dict[str, tuple[str, ...]]:
    """Put the overlays in; the ways that differ on this release."""
    importlib.import_module("sglang.srt.managers.scheduler")
    wanted = [overlay for overlay in OVERLAYS if overlay.id in {"index-upload", *MEMORY}]
    tree = installation.find().tree
    engine.apply(wanted, tree, engine.plan(wanted, tree), lambda _target: WraptHooker(), ledger)
    engine.verify(wanted, ledger)
    there = {name for name, outcome in ledger.outcomes.items() if isinstance(outcome, Applied)}
    ways = {name: tuple(o for o in overlays if o in there) for name, overlays in WAYS.items()}
    return {name: ways[name] for i, name in enumerate(ways) if ways[name] not in [*ways.values()][:i]}


def cell(decoding: Decoding, options: argparse.Namespace, ledger: engine.Ledger, ways: dict, forward: float) -> dict:
    """Times of each way with passes of so many milliseconds."""
    streams, names = decoding.streams, [*ways]
    host: dict[str, list[float]] = {name: [] for name in names}
    period: dict[str, list[float]] = {name: [] for name in names}
    cycles = int(forward * cycles_per_ms()) if forward else 0
    with streams.stream(streams.Stream()):  # the scheduler's; the pass has one of its own
        decoding.prepare()
        before = decoding.forward(cycles)
        for turn in range(options.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                for patch in ledger.patches:
                    patch.active = patch.overlay in ways[name]
                last = 0.0
                for step in range(WARM_UP + options.steps):
                    now, start, aside = time.perf_counter(), decoding.clock(), decoding.aside
                    decoding.prepare()
                    took = decoding.clock() - start - (decoding.aside - aside)
                    end = decoding.forward(cycles)
                    before.synchronize()  # as the scheduler waits for the result of the step before
                    before = end
                    if step >= WARM_UP:
                        host[name].append(1e6 * took)
                        period[name].append(1e6 * (now - last))
                    last = now
        streams.synchronize()
    times = {name: {"host_us": spread(host[name])} for name in names}
    if decoding.device == "cuda":  # else it is the stand-ins' time
        for name in names:
            times[name]["period_us"] = spread(period[name])
    return {"batch": decoding.requests, "forward_ms": forward, "ways": times}


def cycles_per_ms() -> float:
    """Of `torch.cuda._sleep` on this device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return 10_000_000 / start.elapsed_time(end)


def spread(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [
        round(v, 1) for v in (ordered[len(ordered) // 10], statistics.median(ordered), ordered[-1 - len(ordered) // 10])
    ]


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def show(record: dict) -> None:
    table = Table(title=f"SGLang {record['sglang']}: microseconds for a step, median (10th to 90th percentile)")
    names = [*record["cells"][0]["ways"]]
    for title in ("batch", "pass, ms", "", *names):
        table.add_column(title, justify="right")
    for each in record["cells"]:
        for what in each["ways"][names[0]]:
            times = [each["ways"][name][what] for name in names]
            texts = [f"{mid:.0f} ({low:.0f}-{high:.0f})" for low, mid, high in times]
            table.add_row(str(each["batch"]), f"{each['forward_ms']:g}", what.removesuffix("_us"), *texts)
    console = Console(width=max(lines.width(), 120))
    console.print(table)
    console.print(f"host rows: {record['rows_checked']} looked at, {record['wrong_rows']} wrong")


if __name__ == "__main__":
    sys.exit(main())
