"""``demo``: the real server on a model whose right answer is known, with and without the plugin."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import __version__, installation
from ..demo import checks, model, releases, server
from ..demo.setup import SCALES, Launcher, Scale, Target

CPU_RELEASES = ("0.5.10.post1", "0.5.12")
REAL = "SGLang's scheduler, batches, HiSparse coordinator, allocators, pools and HTTP server; the model's weights"
STAND_INS = "DSA indexer, sparse attention, swap-in and KV copies, in plain torch; streams and pinned memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--device", choices=sorted(SCALES), default="cpu")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--release",
        nargs="+",
        metavar="R",
        help=f"releases whose wheels to fetch. Default: the installed SGLang, else {' and '.join(CPU_RELEASES)}",
    )
    which.add_argument(
        "--sglang-path", type=Path, metavar="DIR", help="an unpacked SGLang instead of the installed one"
    )
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep the model and the servers' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: every check held; 1: one did not; 2: the demo cannot run here."""
    console = Console(stderr=options.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped on the way out
    try:
        _require("torch", "safetensors")
        targets = _targets(options, console)
    except (releases.ReleaseUnavailable, installation.NotInstalled, _Missing) as error:
        print(f"sglang-hisparse demo: {error}", file=sys.stderr)
        return 2
    work = options.work_dir or Path(tempfile.mkdtemp(prefix="sglang-hisparse-demo-"))
    work.mkdir(parents=True, exist_ok=True)
    reports = _run(targets, SCALES[options.device], work, console)
    passed = all(report.passed for report in reports)
    if options.json:
        print(json.dumps(_summary(options.device, reports), indent=2))
    else:
        _print(console, options.device, reports)
    if options.work_dir or not passed:
        console.print(f"Logs: {work}")
    else:
        shutil.rmtree(work)
    return 0 if passed else 1


class _Missing(Exception):
    """A package the demo needs is not installed."""


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise _Missing(f"{' and '.join(missing)} missing; `make demo` builds an environment that has what it takes")


def _targets(options: argparse.Namespace, console: Console) -> list[Target]:
    wanted = options.release
    if not wanted:
        try:
            found = installation.find(options.sglang_path)
            return [Target(found.version, found.root)]
        except installation.NotInstalled:
            if options.sglang_path or options.device != "cpu":
                raise
            wanted = CPU_RELEASES
    targets = []
    for release in wanted:
        with console.status(f"SGLang {release}: fetching the wheel"):
            targets.append(Target(release, releases.fetch(release)))
    return targets


def _run(targets: list[Target], scale: Scale, work: Path, console: Console) -> list[checks.Report]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress, ThreadPoolExecutor(len(targets)) as pool:
        writing = progress.add_task("writing the model")
        weights = model.write(work / "model", scale.dims)
        progress.remove_task(writing)

        def one(target: Target) -> checks.Report:
            task = progress.add_task(f"SGLang {target.name}")

            def say(text: str) -> None:
                progress.update(task, description=f"SGLang {target.name}: {text}")

            return checks.run(Launcher(target, scale, weights, work, say))

        try:  # a GPU holds one server at a time; on a CPU most of a server's start is waiting for imports
            return [one(target) for target in targets] if scale.device == "cuda" else list(pool.map(one, targets))
        except BaseException:
            server.stop_all()
            raise


def _summary(device: str, reports: list[checks.Report]) -> dict[str, object]:
    return {
        "device": device,
        **_machine(device),
        "real": REAL,
        "stand_ins": STAND_INS if device == "cpu" else None,
        "passed": all(report.passed for report in reports),
        "releases": [{**asdict(report), "passed": report.passed} for report in reports],
    }


def _machine(device: str) -> dict[str, object]:
    """Where and with what this ran, for the record."""
    here = Path(__file__).parent
    git = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], check=False, capture_output=True, text=True)
    if device == "cuda":
        import torch

        name = torch.cuda.get_device_name()
    else:
        name = f"{os.cpu_count()} x {platform.machine()}"
    return {
        "hardware": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": git.stdout.strip() or None,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _print(console: Console, device: str, reports: list[checks.Report]) -> None:
    for report in reports:
        table = Table(title=f"SGLang {report.release}, {device}", title_justify="left", show_header=False)
        for check in report.checks:
            verdict = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]n/a[/]"}[check.passed]
            table.add_row(verdict, check.name, check.detail)
        console.print(table, f"{report.figures['seconds']:.0f} s")
    console.print(f"Real: {REAL}.")
    console.print(f"CPU stand-ins: {STAND_INS}." if device == "cpu" else "No stand-ins.")
