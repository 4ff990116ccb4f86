"""Runs functions in forked processes with a time limit: a crash or hang of theirs is an answer, not our end."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEPT_OUTPUT = 4000  # characters of what a function printed
AT_ONCE = 4
ENDING_S = 1.0  # for a killed process to be gone; one that sleeps in the kernel is left behind


@dataclass(frozen=True)
class Job:
    """A function whose value is JSON, and how many seconds it may take."""

    function: Callable[[], Any]
    limit_s: float


@dataclass
class Outcome:
    """What became of a job: a value, or the reason why there is none."""

    value: Any = None
    failure: str = ""
    seconds: float = 0.0
    output: str = ""
    """The end of what it printed."""


@dataclass
class _Child:
    name: str
    limit_s: float
    pid: int
    result_fd: int
    output_fd: int
    began: float
    result: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    expired: bool = False


def run(jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """Outcomes by name. Takes no longer than the limits allow; leaves no process that a signal can end."""
    waiting = list(jobs.items())
    outcomes: dict[str, Outcome] = {}
    running: dict[str, _Child] = {}
    try:
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < AT_ONCE:
                    name, job = waiting.pop(0)
                    try:
                        with _uninterrupted():
                            running[name] = child = _start(name, job)
                    except OSError as error:  # no more processes or descriptors
                        outcomes[name] = Outcome(failure=f"could not be started: {error}")
                        continue
                    selector.register(child.result_fd, selectors.EVENT_READ, (child, child.result))
                    selector.register(child.output_fd, selectors.EVENT_READ, (child, child.output))
                for name in _advance(selector, running):
                    child = running.pop(name)
                    for fd in (child.result_fd, child.output_fd):
                        with contextlib.suppress(KeyError):
                            selector.unregister(fd)
                    outcomes[name] = _finish(child)
    finally:
        for child in running.values():
            _kill(child.pid)
    return {name: outcomes[name] for name in jobs}


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interruption waits: its exception is lost in what Python runs after a fork, or would leave a child alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(name: str, job: Job) -> _Child:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    fds: list[int] = []
    try:
        fds += os.pipe()
        fds += os.pipe()
        pid = os.fork()
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    result_fd, result_end, output_fd, output_end = fds
    if pid == 0:
        _child(job, result_end, output_end)
    os.close(result_end)
    os.close(output_end)
    os.set_blocking(result_fd, False)
    os.set_blocking(output_fd, False)
    return _Child(name, job.limit_s, pid, result_fd, output_fd, time.monotonic())


def _child(job: Job, result_end: int, output_end: int) -> NoReturn:
    try:
        os.setsid()  # so that everything it starts can be ended with it
        for number in (*INTERRUPTIONS, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
        signal.alarm(int(job.limit_s) + 5)  # should nobody be left to end it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.dont_write_bytecode = True
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output_end, 1)
        os.dup2(output_end, 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, errors="replace", closefd=False) for fd in (1, 2))
        try:
            answer = {"value": job.function()}
        except BaseException as error:  # also what a package does to end the process
            answer = {"failure": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer, default=str).encode()
        while text:
            text = text[os.write(result_end, text) :]
    finally:
        os._exit(0)


def _advance(selector: selectors.BaseSelector, running: Mapping[str, _Child]) -> list[str]:
    """Read what is there, until a child has closed its result or has run out of time; the names of those."""
    now = time.monotonic()
    left = min((child.began + child.limit_s - now for child in running.values()), default=0.0)
    ended = []
    for key, _ in selector.select(max(0.0, min(left, 1.0))):
        child, sink = key.data
        chunk = os.read(key.fd, 65536)
        sink += chunk
        if sink is child.output:
            del sink[: -4 * KEPT_OUTPUT]
        if not chunk:
            selector.unregister(key.fd)
            if sink is child.result:
                ended.append(child.name)
    for child in running.values():
        if child.name not in ended and time.monotonic() > child.began + child.limit_s:
            child.expired = True
            ended.append(child.name)
    return ended


def _finish(child: _Child) -> Outcome:
    outcome = Outcome(seconds=round(time.monotonic() - child.began, 3))
    status = None if child.expired else _reap(child.pid)
    _kill(child.pid)
    if status is None:
        _reap(child.pid)
    with contextlib.suppress(OSError):
        child.output += os.read(child.output_fd, 65536)
    os.close(child.result_fd)
    os.close(child.output_fd)
    outcome.output = child.output.decode(errors="replace").strip()[-KEPT_OUTPUT:]
    if child.expired:
        outcome.failure = f"no answer in {child.limit_s:g} s"
        return outcome
    try:
        answer = json.loads(child.result)
        outcome.value, outcome.failure = answer.get("value"), answer.get("failure", "")
    except ValueError:
        outcome.failure = _death(status)
    return outcome


def _death(status: int | None) -> str:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"died of {signal.Signals(number).name}"
        except ValueError:
            return f"died of signal {number}"
    return "ended without an answer"


def _reap(pid: int) -> int | None:
    """The exit status, waited for no longer than `ENDING_S`."""
    end = time.monotonic() + ENDING_S
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if done:
            return status
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
