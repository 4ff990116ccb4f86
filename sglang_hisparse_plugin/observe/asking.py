"""The side that asks a running server for a trace and waits for the file."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from . import request
from .request import Request

POLL = 0.2  # seconds between two looks into the folder
GRACE = 30.0  # seconds that a server may take to begin, and to finish
SETTLED = 0.6  # seconds without a change after which no other scheduler of the server will deliver


def record(folder: Path, wanted: Request, console: Console) -> list[Path]:
    """Have a trace recorded; returns a file for each scheduler that selected something.

    Ctrl-C ends the recording in the server, and what was recorded until then is returned. Whatever else ends this
    process: a request that it leaves behind is over after its seconds, or when the next one replaces it.

    Raises:
        OSError: nobody records in this folder, somebody else has a trace recorded, or the server could not.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: start the server with --hisparse-plugin-trace {folder}")
    held = os.open(folder, os.O_RDONLY)
    try:
        if request.lock(held) is False:
            raise BlockingIOError(f"another explore has a trace recorded in {folder}: wait for it, or end it")
        with _leaving_cleanly():
            request.ask(folder, wanted)
            try:
                return _told(folder, wanted, console)
            finally:
                request.withdraw(folder, wanted)
    finally:
        os.close(held)


def _told(folder: Path, wanted: Request, console: Console) -> list[Path]:
    begun = time.monotonic()
    with console.status("waiting for the server") as status:

        def progress(size: int) -> None:
            seconds = min(wanted.seconds, time.monotonic() - begun)
            status.update(
                f"recording: {seconds:.0f} of {wanted.seconds:g} s, {size / (1 << 20):.1f} MiB; Ctrl-C ends it and "
                "keeps what there is"
            )

        try:
            return _result(folder, wanted, wanted.seconds + GRACE, progress, console)
        except KeyboardInterrupt:
            if not wanted.files(folder, request.PART):
                raise
            request.withdraw(folder, wanted)
            console.print("The recording is being ended; Ctrl-C once more leaves without the curve.")
            return _result(folder, wanted, GRACE, progress, console)


def _result(folder: Path, wanted: Request, patience: float, progress: Any, console: Console) -> list[Path]:
    begun = changed = time.monotonic()
    before: list[Path] = []
    while (now := time.monotonic()) < begun + patience:
        parts = wanted.files(folder, request.PART)
        whole, failed = (wanted.files(folder, ending) for ending in (request.WHOLE, request.FAILED))
        if before != [*parts, *whole, *failed]:
            before, changed = [*parts, *whole, *failed], now
        if parts:
            if dead := [part for part in parts if request.abandoned(part)]:
                raise OSError(f"the server ended while it recorded; what it wrote until then is in {dead[0]}")
            progress(sum(_size(part) for part in parts))
        elif (whole or failed) and now > changed + SETTLED:
            return _delivered(whole, failed, console)
        elif not before and now > begun + GRACE:
            break
        time.sleep(POLL)
    if before:
        raise TimeoutError(f"the server does not finish {before[0]}: does it still answer?")
    raise TimeoutError(
        f"no server has begun to record in {folder}: is one running with --hisparse-plugin-trace {folder}, and does "
        "its log say something about a HiSparse trace?"
    )


def _delivered(whole: list[Path], failed: list[Path], console: Console) -> list[Path]:
    reasons = []
    for path in failed:
        with contextlib.suppress(OSError):
            reasons.append(path.read_text("utf-8") or f"it cannot write to {path.parent}; is the disk full?")
            path.unlink()
    if not whole:
        raise OSError(f"the server has recorded nothing: {'; '.join(sorted(set(reasons)))}")
    for reason in reasons:
        console.print(f"One of the server's schedulers has recorded nothing: {reason}", highlight=False, soft_wrap=True)
    return whole


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # renamed meanwhile
        return 0


@contextlib.contextmanager
def _leaving_cleanly() -> Iterator[None]:
    """A polite signal ends this process by way of its `finally`s."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
