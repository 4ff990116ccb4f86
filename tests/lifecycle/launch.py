"""A process of one release: its environment, and what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sglang_hisparse_plugin.demo import cpu, releases

from . import server

HERE = Path(__file__).parent
PROGRESS = "fuzz: "
"""Begins the lines on stderr that are for the reader."""


class Ended(RuntimeError):
    """The process did not print its results."""


def environment(sglang: Path, plugin: str, **more: str) -> dict[str, str]:
    """For a process that runs a scheduler of this SGLang on a CPU and imports the tests; `plugin` is its mode."""
    found = cpu.environment(sglang) | server.environment(sglang) | {"SGLANG_HISPARSE_PLUGIN": plugin} | more
    found["PYTHONPATH"] += f":{HERE.parents[1]}:{HERE.parent}"
    return found


def hunt(release: str, job: list[dict], timeout: float, say: Callable[[str], None] = lambda _: None) -> list[dict]:
    """What the state machine found on each scheduler of a job, see `hunt.py`; `say` hears how far it is.

    Raises:
        Ended: it did not get that far.
    """
    sglang = releases.fetch(release)
    with tempfile.TemporaryDirectory() as scratch, (Path(scratch) / "out").open("w+") as out:
        env = environment(sglang, "off", TMPDIR=scratch)  # until `hunt` registers it: or a `.pth` file would, on 0.5.10
        command = [sys.executable, "-m", f"{__package__}.hunt", release, json.dumps(job)]
        with subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            timer = threading.Timer(timeout, _end, [process])
            timer.start()
            try:
                errors = deque(_heard(process, say), maxlen=60)
            finally:
                timer.cancel()
                _end(process)
        out.seek(0)
        lines = [line for line in out if line.startswith("[")]
    results = json.loads(lines[-1]) if lines and lines[-1].startswith(("[{", "[null")) else [None]
    if None in results:
        raise Ended(f"the state machine on {release} did not come to an end:\n{''.join(errors)[-4000:]}")
    return results


def _heard(process: subprocess.Popen[str], say: Callable[[str], None]):
    for line in process.stderr or ():
        if line.startswith(PROGRESS):
            say(line.removeprefix(PROGRESS).rstrip())
        else:
            yield line


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
