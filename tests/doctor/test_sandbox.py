"""Whatever a job does, it is an answer in time, and nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang_hisparse_plugin.doctor import sandbox


def one(function: Callable[[], Any], limit_s: float = 10.0) -> sandbox.Outcome:
    return sandbox.run({"it": sandbox.Job(function, limit_s)})["it"]


def crash() -> None:
    ctypes.string_at(0)


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def loud() -> str:
    os.write(1, b"x" * 10_000_000)
    print("the end", file=sys.stderr)
    return "said it"


def raised() -> None:
    raise RuntimeError("broken")


def endless() -> None:
    endless()


def self_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def closes_everything() -> None:
    os.closerange(0, 100)


ANSWERS: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "value": (lambda: {"a": [1, None]}, {"a": [1, None]}, ""),
    "large value": (lambda: "x" * 5_000_000, "x" * 5_000_000, ""),
    "no JSON": (lambda: {"a": {1, 2}}, {"a": "{1, 2}"}, ""),
    "exception": (raised, None, "RuntimeError: broken"),
    "end of the process": (lambda: sys.exit(3), None, "SystemExit: 3"),
    "hard end": (lambda: os._exit(0), None, "ended without an answer"),
    "crash": (crash, None, "died of SIGSEGV"),
    "abort": (os.abort, None, "died of SIGABRT"),
    "killed": (self_kill, None, "died of SIGKILL"),
    "output": (loud, "said it", ""),
    "closed descriptors": (closes_everything, None, "ended without an answer"),
    "recursion": (endless, None, "RecursionError"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name: str) -> None:
    function, value, failure = ANSWERS[name]
    outcome = one(function)
    assert outcome.value == value and outcome.failure.startswith(failure) and bool(outcome.failure) == bool(failure)


def test_the_end_of_the_output_is_kept() -> None:
    outcome = one(loud)
    assert outcome.output.endswith("the end") and len(outcome.output) <= sandbox.KEPT_OUTPUT


def test_one_that_hears_no_signal_is_left_after_its_time() -> None:
    outcomes = sandbox.run({"deaf": sandbox.Job(deaf, 0.5), "other": sandbox.Job(lambda: 1, 10)})
    assert outcomes["deaf"].failure == "no answer in 0.5 s" and outcomes["other"].value == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_what_a_job_has_started_ends_with_it(hangs: bool, tmp_path: Any) -> None:
    pid_file = tmp_path / "pid"

    def start() -> str:
        child = subprocess.Popen(["sleep", "1000"])
        pid_file.write_text(str(child.pid))
        while hangs:
            time.sleep(60)
        return "done"

    one(start, 1.0)
    pid = int(pid_file.read_text())
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().split()[2] == "Z":  # whoever adopts it has not looked yet
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    pytest.fail("it is still there")


def test_more_jobs_than_run_at_once_keep_their_order_and_leave_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    outcomes = sandbox.run({str(i): sandbox.Job(lambda i=i: i, 10) for i in range(20)})
    assert [outcome.value for outcome in outcomes.values()] == list(range(20))
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_no_more_processes_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert one(lambda: 1).failure.startswith("could not be started")


def test_an_interrupted_run_ends_its_jobs(tmp_path: Any) -> None:
    script = (
        "import sys, time, os; from pathlib import Path; from sglang_hisparse_plugin.doctor import sandbox\n"
        "def job():\n    Path(sys.argv[1]).write_text(str(os.getpid()))\n    time.sleep(1000)\n"
        "sandbox.run({'job': sandbox.Job(job, 1000)})\n"
    )
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(pid_file)],
        stderr=subprocess.DEVNULL,
        # a shell's background has it ignored; no thread runs here
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(20)
    pid = int(pid_file.read_text())
    for _ in range(200):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.02)
    with open(f"/proc/{pid}/stat") as stat:
        assert stat.read().split()[2] == "Z"
