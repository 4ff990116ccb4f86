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
import fcntl
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

COST = ("cpu-sync", "index-upload")
WARM_UP = 3  # steps before timed ones
MEMORY = ("retract-order", "retract-once", "decode-memory")
WAYS = {
    "SGLang": (),
    "cpu-sync": ("cpu-sync",),
    "index-upload": ("index-upload",),
    "both": COST,
    "both, decode-memory": (*COST, *MEMORY),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--release", action="append", help="on a CPU: fetch and measure this one; may be repeated")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=12, help="turns of each way")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a turn; three more come before them")
    parser.add_argument("--forward", type=float, nargs="+", default=[0.0, 3.0], help="milliseconds of a pass on a GPU")
    parser.add_argument("--lock", type=Path, help="measure while nobody else does who names this file")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--commit", default=provenance.commit(), help="of this code, where no repository tells")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.device == "cuda" or options.here:
        records = [measured(options)]
    else:
        records = [in_process(release, options) for release in options.release or ["0.5.12"]]
    if options.here:
        print(json.dumps(records[0]))
        return 0
    shared = {name: records[0][name] for name in records[0] if name not in OWN}
    record = {**shared, "releases": [{name: each[name] for name in OWN} for each in records]}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for each in record["releases"]:
        show(each)
    return max(each["wrong_rows"] for each in records) > 0


OWN = ("sglang", "overlays", "rows_checked", "wrong_rows", "cells")


def in_process(release: str, options: argparse.Namespace) -> dict:
    """Of a release, in a process with the stand-ins."""
    counts = ["--batch", *map(str, options.batch), "--rounds", str(options.rounds), "--steps", str(options.steps)]
    counts += ["--commit", options.commit or ""]
    env = cpu.environment(releases.fetch(release)) | {"SGLANG_HISPARSE_PLUGIN": "off"}
    command = [sys.executable, __file__, "--here", *counts]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(options: argparse.Namespace) -> dict:
    os.environ["SGLANG_HISPARSE_PLUGIN"] = "off"  # what is switched on and off here is applied here
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    ledger = engine.Ledger()
    ways = applied(ledger)
    on_gpu = options.device == "cuda"
    passes = options.forward if on_gpu else [0.0]
    steps = len(passes) * options.rounds * (options.steps + WARM_UP) * len(ways) + 2 * WARM_UP + len(passes)
    size = Size(2048, 4096, 4200, steps) if on_gpu else Size(64, 128, 200, steps)
    every, cells, wrong = [], [], 0
    with torch.inference_mode():
        # All at once and to the end: SGLang never takes back the registration of a host pool's memory.
        every = [Decoding(options.device, batch, size) for batch in options.batch]
        for decoding in every:  # compile what is compiled at first use
            for _ in range(WARM_UP):
                decoding.prepare()
                decoding.forward(0)
        with held(options.lock):
            for decoding in every:
                cells += [cell(decoding, options, ledger, ways, forward) for forward in passes]
        for decoding in every:
            wrong += decoding.wrong_rows()
            decoding.spoil()
        if sum(decoding.wrong_rows() for decoding in every) < wrong + len(every):
            raise AssertionError("host rows that were changed on purpose were not found")
    return {
        "what": "microseconds on the host for check_decode_mem and prepare_for_decode of a step (host_us), and from "
        "one step to the next (period_us): [10th percentile, median, 90th percentile]",
        "less": None
        if on_gpu
        else "host_us is CPU time of the scheduler's thread, without what a stand-in does: the page "
        "allocator's kernel, interpreted on a CPU, and the copies of the backup",
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu: {processor()}",
        "driver": provenance.driver() if on_gpu else None,
        "stand_ins": None if on_gpu else cpu.STAND_INS,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plugin": __version__,
        "commit": options.commit,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "size": vars(size),
        "steps_per_way": options.rounds * options.steps,
        "sglang": installation.find().version,
        "overlays": {name: type(outcome).__name__ for name, outcome in ledger.outcomes.items()},
        "rows_checked": sum(decoding.rows for decoding in every),
        "wrong_rows": wrong,
        "cells": cells,
    }


def applied(ledger: engine.Ledger) -> dict[str, tuple[str, ...]]:
    """Put the overlays in; the ways that differ on this release."""
    importlib.import_module("sglang.srt.managers.scheduler")
    wanted = [overlay for overlay in OVERLAYS if overlay.id in {*COST, *MEMORY}]
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
    times = {name: {"host_us": spread(host[name]), "period_us": spread(period[name])} for name in names}
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


@contextlib.contextmanager
def held(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
        for what in ("host_us", "period_us"):
            times = [each["ways"][name][what] for name in names]
            texts = [f"{mid:.0f} ({low:.0f}-{high:.0f})" for low, mid, high in times]
            table.add_row(str(each["batch"]), f"{each['forward_ms']:g}", what.removesuffix("_us"), *texts)
    console = Console(width=max(lines.width(), 120))
    console.print(table)
    console.print(f"host rows: {record['rows_checked']} looked at, {record['wrong_rows']} wrong")


if __name__ == "__main__":
    sys.exit(main())
