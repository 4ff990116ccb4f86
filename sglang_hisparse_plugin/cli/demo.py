"""``demo``: the real server on a model whose right answer is known, with and without the plugin."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console

from .. import installation
from ..demo import checks, dp, load, pd, ranks, releases, results, speculation
from ..demo import run as demo
from ..demo.progress import Say, line
from ..demo.report import Report
from ..demo.run import CPU_RELEASES, CannotRun
from ..demo.scales import SCALES
from ..demo.setup import BACKENDS, Launcher, Target, Variant
from ..demo.weights import Draft


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--device", choices=sorted(SCALES), default="cpu")
    ranks_of = {
        "--tp": "tensor-parallel ranks, a GPU each: 1 (default) or 2",
        "--dp": "ranks of DP attention, each with requests of its own; 2 stands for --tp 2 as well",
    }
    for flag, text in ranks_of.items():
        parser.add_argument(flag, type=int, choices=(1, 2), default=1, metavar="N", help=text)
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
    except (CannotRun, releases.ReleaseUnavailable, installation.NotInstalled) as error:
        print(f"sglang-hisparse demo: {error}", file=sys.stderr)
        return 2


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
    _agree(options)
    variant = _variant(options)
    targets = demo.targets(options.release, options.sglang_path, options.device, console)
    work = _folder(options.work_dir)
    keep = options.work_dir is not None
    try:
        reports = _reports(options, variant, targets, work, console)
        passed = all(report.passed for report in reports)
        keep = keep or not passed
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    out = console if options.json else Console()
    if options.json:
        more = {"dp": options.dp, "variant": variant and asdict(variant)}
        print(json.dumps(results.record(options.device, options.tp, reports) | more, indent=2))
    else:
        results.show(out, options.device, reports)
    if variant:
        line(out, f"Speculative decoding: {variant}")
    if keep:
        line(out, f"Logs: {work}")
    line(out, results.verdict(options.device, reports))
    return 0 if passed else 1


def _require(device: str, tp: int) -> None:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRun(f"{' and '.join(missing)} missing; `make demo` builds an environment that has what it takes")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise CannotRun("torch finds no CUDA device here; use --device cpu")
        if torch.cuda.device_count() < tp:
            raise CannotRun(f"--tp {tp} needs {tp} GPUs, and torch finds {torch.cuda.device_count()}; use --device cpu")


def _agree(options: argparse.Namespace) -> None:
    loaded = options.load is not None
    if options.dp > 1 and (options.speculative or options.pd):
        raise CannotRun("--dp goes with --load alone; take it without --speculative and --pd")
    if options.seed is not None and not loaded:
        raise CannotRun("--seed goes with --load")
    if loaded and not 0 < options.load < float("inf"):
        raise CannotRun(f"--load takes a number of seconds above 0, not {options.load}")
    if options.pd and (options.speculative or loaded or options.tp > 1):
        raise CannotRun("--pd is a set of checks of its own; take it without --speculative, --load and --tp")
    if options.speculative and loaded:
        raise CannotRun("--load and --speculative are two sets of checks; take one of them")


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
            raise CannotRun(f"{', '.join(name for name, value in given.items() if value)} go with --speculative")
        return None
    default = Variant()
    dtype = options.kv_cache_dtype or default.kv_dtype
    if options.device == "cpu" and dtype != default.kv_dtype:
        raise CannotRun(f"no stand-in on a CPU for a KV cache of {dtype}; use --device cuda, or {default.kv_dtype}")
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
        raise CannotRun(f"no folder for the model and the logs: {error}; name another one with --work-dir") from error


def _reports(
    options: argparse.Namespace, variant: Variant | None, targets: list[Target], work: Path, console: Console
) -> list[Report]:
    scale = SCALES[options.device]
    if options.load is not None or options.pd:
        scale = load.small(scale)
    if variant:
        scale = scale.verifying(variant.draft_tokens)
    common = {"variant": variant or Variant(), "tp": options.tp, "dp": options.dp}

    def launcher(target: Target, say: Say) -> Launcher:
        return Launcher(target, scale, work / "model", work, say, **common)

    # a GPU holds one server at a time; on a CPU most of a server's start is waiting for imports
    at_once = scale.device == "cpu" and options.tp == 1 and not options.pd
    drafts = [*Draft] if variant else [Draft.RIGHT]
    return demo.on_each(targets, launcher, _checks(options), drafts=drafts, at_once=at_once, console=console)


def _checks(options: argparse.Namespace) -> demo.Checks:
    if options.load is not None:
        return functools.partial(load.run, seconds=options.load, seed=options.seed or 0)
    if options.speculative:
        return functools.partial(speculation.run, quick=options.quick)
    if options.pd:
        return pd.run
    if options.dp > 1:
        return dp.run
    return ranks.run if options.tp > 1 else checks.run
