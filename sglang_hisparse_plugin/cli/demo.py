"""``demo``: the real server on a model whose right answer is known, with and without the plugin."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .. import __version__, installation, provenance, upstream
from ..demo import checks, cpu, dp, load, model, pd, ranks, releases, server, speculation
from ..demo.setup import BACKENDS, SCALES, Launcher, Scale, Target, Variant
from ..demo.weights import Draft

CPU_RELEASES = ("0.5.10.post1", "0.5.12")
REAL = "SGLang's scheduler, batches, HiSparse coordinator, allocators, pools and HTTP server; the model's weights"
ADDED = "a hook that reads the pools' free slots, and one that makes the wrong host rows of the controls"

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--device", choices=sorted(SCALES), default="cpu")
    parser.add_argument(
        "--tp",
        type=int,
        choices=(1, 2),
        default=1,
        metavar="N",
        help="tensor-parallel ranks, a GPU each: 1 (default) or 2",
    )
    parser.add_argument(
        "--dp",
        type=int,
        choices=(1, 2),
        default=1,
        metavar="N",
        help="ranks of DP attention, each with requests of its own; 2 stands for --tp 2 as well",
    )
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
    speculative = parser.add_argument_group(
        "speculative decoding", "with the model's own next-token layer (EAGLE, chains), instead of the other checks"
    )
    speculative.add_argument("--speculative", action="store_true", help="check HiSparse under speculative decoding")
    speculative.add_argument(
        "--draft-tokens", type=int, choices=(2, 3, 4), metavar="N", help="tokens verified at once: 2, 3 (default) or 4"
    )
    speculative.add_argument("--no-overlap", action="store_true", help="without the overlap scheduler")
    speculative.add_argument("--eager", action="store_true", help="without CUDA graphs")
    speculative.add_argument("--kv-cache-dtype", choices=sorted(BACKENDS), help="default: bfloat16; others need a GPU")
    speculative.add_argument("--quick", action="store_true", help="one server, whose drafts are half wrong")
    load_group = parser.add_argument_group(
        "load", "clients that stream, abort and disconnect, on pools too small for them, instead of the other checks"
    )
    load_group.add_argument("--load", type=float, metavar="SECONDS", help="how long they keep coming")
    load_group.add_argument("--seed", type=int, metavar="N", help="of what they do; default 0")
    parser.add_argument(
        "--pd",
        action="store_true",
        help="prefill on one server and decode, with HiSparse, on another, instead of the other checks; needs Mooncake",
    )
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="keep the model and the servers' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: every check held; 1: one did not; 2: the demo cannot run here."""
    try:
        with _orderly_end():
            return _demo(options, Console(stderr=True))
    except (_CannotRun, releases.ReleaseUnavailable, installation.NotInstalled) as error:
        print(f"sglang-hisparse demo: {error}", file=sys.stderr)
        return 2


class _CannotRun(Exception):
    """Something the demo needs is not here; the text says what, and the remedy."""


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """An interruption, SIGTERM or a closed terminal leaves as an exception would; further ones do not disturb that."""
    names = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    heeded = [name for name in names if signal.getsignal(name) != signal.SIG_IGN]  # as SIGHUP is under nohup

    def leave(number: int, _: FrameType | None) -> None:
        for name in heeded:
            signal.signal(name, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {name: signal.signal(name, leave) for name in heeded}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _demo(options: argparse.Namespace, console: Console) -> int:
    """`console`: for progress and remarks; the result goes to stdout."""
    options.tp = max(options.tp, options.dp)
    _require(options.device, options.tp)
    if options.dp > 1 and (options.speculative or options.pd):
        raise _CannotRun("--dp goes with --load alone; take it without --speculative and --pd")
    if options.seed is not None and options.load is None:
        raise _CannotRun("--seed goes with --load")
    if options.load is not None and not 0 < options.load < float("inf"):
        raise _CannotRun(f"--load takes a number of seconds above 0, not {options.load}")
    if options.pd and (options.speculative or options.load is not None or options.tp > 1):
        raise _CannotRun("--pd is a set of checks of its own; take it without --speculative, --load and --tp")
    variant = _variant(options)
    targets = _targets(options, console)
    work = _folder(options.work_dir)
    keep = options.work_dir is not None
    try:
        reports = _run(options, variant, targets, work, console)
        passed = all(report.passed for report in reports)
        keep = keep or not passed
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    out = console if options.json else Console()
    if options.json:
        print(
            json.dumps(
                _summary(options.device, options.tp, reports)
                | {"dp": options.dp, "variant": variant and asdict(variant)},
                indent=2,
            )
        )
    else:
        _print(out, options.device, reports)
    if variant:
        _line(out, f"Speculative decoding: {variant}")
    if keep:
        _line(out, f"Logs: {work}")
    _line(out, _verdict(options.device, reports))
    return 0 if passed else 1


def _require(device: str, tp: int) -> None:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise _CannotRun(f"{' and '.join(missing)} missing; `make demo` builds an environment that has what it takes")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise _CannotRun("torch finds no CUDA device here; use --device cpu")
        if torch.cuda.device_count() < tp:
            raise _CannotRun(
                f"--tp {tp} needs {tp} GPUs, and torch finds {torch.cuda.device_count()}; use --device cpu"
            )


def _variant(options: argparse.Namespace) -> Variant | None:
    """How servers that speculate run; None: none does."""
    given = {
        "--draft-tokens": options.draft_tokens,
        "--no-overlap": options.no_overlap,
        "--eager": options.eager,
        "--kv-cache-dtype": options.kv_cache_dtype,
        "--quick": options.quick,
    }
    if not options.speculative:
        if any(given.values()):
            raise _CannotRun(f"{', '.join(name for name, value in given.items() if value)} go with --speculative")
        return None
    if options.load is not None:
        raise _CannotRun("--load and --speculative are two sets of checks; take one of them")
    default = Variant()
    dtype = options.kv_cache_dtype or default.kv_dtype
    if options.device == "cpu" and dtype != default.kv_dtype:
        raise _CannotRun(f"no stand-in on a CPU for a KV cache of {dtype}; use --device cuda, or {default.kv_dtype}")
    graphs = options.device != "cpu" and not options.eager  # a CPU has none
    return Variant(options.draft_tokens or default.draft_tokens, not options.no_overlap, graphs, dtype)


def _folder(wanted: Path | None) -> Path:
    """For the model and the logs."""
    try:
        if wanted is None:
            return Path(tempfile.mkdtemp(prefix="sglang-hisparse-demo-"))
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    except OSError as error:
        raise _CannotRun(f"no folder for the model and the logs: {error}; name another one with --work-dir") from error


def _targets(options: argparse.Namespace, console: Console) -> list[Target]:
    wanted = options.release
    if not wanted:
        try:
            found = installation.find(options.sglang_path)
            return [_fit(Target(found.version, found.root))]
        except installation.NotInstalled:
            if options.sglang_path or options.device != "cpu":
                raise
            wanted = CPU_RELEASES
    else:
        wanted = list(dict.fromkeys(map(releases.canonical, wanted)))
    targets = []
    with _progress(console) as begin:
        for release in wanted:
            begin(f"SGLang {release}")("looking for the wheel, or fetching it")
            targets.append(_fit(Target(release, releases.fetch(release))))
    return targets


def _fit(target: Target) -> Target:
    if upstream.lacks_hisparse(installation.find(target.root).tree):
        raise _CannotRun(f"SGLang {target.name} has no HiSparse; take a release from {CPU_RELEASES[0]} on")
    return target


def _run(
    options: argparse.Namespace, variant: Variant | None, targets: list[Target], work: Path, console: Console
) -> list[checks.Report]:
    scale = SCALES[options.device]
    if options.load is not None or options.pd:
        scale = load.small(scale)
    if variant:
        scale = scale.verifying(variant.draft_tokens)
    with _progress(console) as begin, ThreadPoolExecutor(len(targets)) as pool:
        says = [begin(f"SGLang {target.name}") for target in targets]
        says[0]("writing the model")
        weights = _write_models(work, scale, [Draft.HALF, Draft.WRONG] if variant else [])

        def one(target: Target, say: Say) -> checks.Report:
            launcher = Launcher(target, scale, weights, work, say, variant or Variant(), options.tp, options.dp)
            if options.load is not None:
                return load.run(launcher, options.load, options.seed or 0)
            if variant:
                return speculation.run(launcher, options.quick)
            if options.pd:
                return pd.run(launcher)
            if options.dp > 1:
                return dp.run(launcher)
            return ranks.run(launcher) if options.tp > 1 else checks.run(launcher)

        # a GPU holds one server at a time; on a CPU most of a server's start is waiting for imports
        one_by_one = scale.device == "cuda" or options.tp > 1 or options.pd
        every: Callable[..., Iterator[checks.Report]] = map if one_by_one else pool.map
        try:
            return list(every(one, targets, says))
        except BaseException:
            server.stop_all()
            raise


def _write_models(work: Path, scale: Scale, others: list[Draft]) -> Path:
    """The folder of the model; those with `others` of its next-token layer are beside it."""
    folder = work / "model"
    try:
        model.write(folder, scale.dims)
        for draft in others:
            model.write(model.folder(folder, draft), scale.dims, draft)
    except OSError as error:
        raise _CannotRun(
            f"cannot write the model to {work}: {error}; make room there, or name another folder with --work-dir"
        ) from error
    return folder


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], Say]]:
    """Something that begins a task and returns what says how far it is: spinners for a person, else plain lines."""
    if not console.is_terminal:
        yield lambda name: _line_by_line(console, name)
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:

        def begin(name: str) -> Say:
            task = progress.add_task(name)
            return lambda text: progress.update(task, description=f"{name}: {text}")

        yield begin


def _line_by_line(console: Console, name: str) -> Say:
    last = ""

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            _line(console, f"{name}: {text}")
        last = text

    return say


def _line(console: Console, text: str) -> None:
    """As it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _summary(device: str, tp: int, reports: list[checks.Report]) -> dict[str, object]:
    return {
        "device": device,
        "tp": tp,
        **machine(device, tp),
        "real": REAL,
        "added": ADDED,
        "stand_ins": list(cpu.STAND_INS.values()) if device == "cpu" else None,
        "verdict": _verdict(device, reports),
        "passed": all(report.passed for report in reports),
        "releases": [{**asdict(report), "passed": report.passed} for report in reports],
    }


def machine(device: str, gpus: int = 1) -> dict[str, object]:
    """Where and with what this ran, for the record."""
    if device == "cuda":
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(gpus)]
        name = names[0] if gpus == 1 else f"{gpus} x {' and '.join(dict.fromkeys(names))}"
    else:
        name = f"{os.cpu_count()} x {platform.machine()}"
    return {
        "hardware": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": provenance.commit(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }


def _verdict(device: str, reports: list[checks.Report]) -> str:
    """The whole result in one line."""
    outcomes = [check.passed for report in reports for check in report.checks]
    made, failed, not_made = (len(outcomes) - outcomes.count(None), outcomes.count(False), outcomes.count(None))
    where = f"SGLang {' and '.join(report.release for report in reports)}, {device}"
    if not all(report.checks for report in reports):
        return f"not every check was made on {where}"
    verdict = f"{failed} of {made} checks fail" if failed else f"all {made} checks hold"
    return f"{verdict} on {where}" + (f"; {not_made} not applicable" if not_made else "")


def _print(console: Console, device: str, reports: list[checks.Report]) -> None:
    for report in reports:
        table = Table(title=f"SGLang {report.release}, {device}", title_justify="left", show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for check in report.checks:
            verdict = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]n/a[/]"}[check.passed]
            table.add_row(verdict, Text(check.name), Text(check.detail))
        console.print(table, f"{report.figures['seconds']:.0f} s")
    _line(console, f"Real: {REAL}.")
    _line(console, f"Added: {ADDED}.")
    if device == "cpu":
        _line(console, "Stand-ins, because this is no GPU:")
        for text in cpu.STAND_INS.values():
            _line(console, f"- {text}.")
    else:
        _line(console, "No stand-ins.")
