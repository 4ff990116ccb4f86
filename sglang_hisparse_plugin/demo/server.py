"""One SGLang server: started as a user would, watched until it is ready, and stopped with everything it started."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from . import probe
from .client import Client, sampling
from .patience import Deadline, stretched

Progress = Callable[[str], None]
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?$", re.M)
STAGES_PATIENCE = 20  #: seconds in which all pipeline stages must have told their state
_running: set[Server] = set()
_stopping = threading.Event()


def stop_all() -> None:
    """End every server of this process, and let no other one start: the demo is being interrupted."""
    _stopping.set()
    for server in list(_running):
        server.stop()


class ServerFailed(RuntimeError):
    """The server did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Answer:
    """To one request."""

    tokens: list[int]
    verifications: int
    """Passes in which drafts were verified; 0 without speculative decoding."""


class Server:
    """Context manager around `python -m sglang.launch_server` in a process group of its own.

    Args:
        command: everything but `--host` and `--port`.
        env: all environment variables.
        log: file for stdout and stderr.
        patience: seconds until the server must be ready, and until it must answer; longer on a busy machine.
        progress: called with a word while it starts, again and again.
    """

    stages = 1
    """Pipeline stages."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path, patience: float, progress: Progress) -> None:
        self.command, self.env, self.log, self.patience, self.progress = command, env, log, patience, progress
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        if _stopping.is_set():
            raise ServerFailed("interrupted")
        _running.add(self)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [*self.command, "--host=127.0.0.1", f"--port={self.port}"],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        """Whether the server's first process still runs; it goes when its scheduler dies."""
        return self._process is not None and self._process.poll() is None

    @property
    def answer_patience(self) -> float:
        """Seconds until it must answer a request that is sent now."""
        return stretched(self.patience)

    def ended(self, within: float = 0) -> bool:
        """Whether the server's first process ended by itself, now or `within` seconds."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within)
        return not self.alive

    def last_exception(self) -> str | None:
        """The last line of the log that ends a traceback: the exception's name and the first line of its message."""
        found = _EXCEPTION.findall(self.log_text())
        return found[-1].rstrip(" ,:") if found else None

    def client(self, tokens: list[int], steps: int, rid: str | None = None) -> Client:
        """A request to it, not yet sent."""
        return Client(f"http://127.0.0.1:{self.port}", rid or uuid.uuid4().hex, tokens, steps, self.answer_patience)

    def generate(
        self, tokens: list[int], steps: int, rid: str | None = None, rank: int | None = None, temperature: float = 0
    ) -> Answer:
        """The `steps` tokens that decoding appends.

        Args:
            rank: of DP attention, whose request it is; None: the server chooses.
            temperature: 0: greedy decoding.

        Raises:
            OSError: no answer: the server died, refused, or took longer than it had to start.
        """
        body: dict[str, Any] = {"input_ids": tokens, "sampling_params": sampling(tokens, steps, temperature)}
        if rid:
            body["rid"] = rid
        if rank is not None:
            body["routed_dp_rank"] = rank
        answer = self._ask("/generate", self.answer_patience, json.dumps(body).encode())
        meta = answer.get("meta_info", {})
        return Answer([int(token) for token in answer["output_ids"]], int(meta.get("spec_verify_ct", 0)))

    def internal_state(self) -> dict[str, Any]:
        """What the scheduler process says about itself, and what the probe says in those of other pipeline stages."""
        before = len(probe.other_stages(self.log_text()))
        state = dict(self._ask("/server_info", stretched(30))["internal_states"][0])
        deadline = Deadline(STAGES_PATIENCE)
        while len(others := probe.other_stages(self.log_text())[before:]) < self.stages - 1:
            if deadline.passed():
                raise ConnectionError(f"{len(others)} of {self.stages - 1} further pipeline stages told their state")
            time.sleep(0.1)
        for stage, other in enumerate(others, 1):
            probe.join(state[probe.KEY], other, f"of stage {stage}")
        return state

    def log_text(self) -> str:
        """All the server has printed so far."""
        return self.log.read_text(errors="replace")

    def stop(self, politely: bool = True) -> None:
        """End every process of the group: politely, then not; or as a crash would."""
        _running.discard(self)
        process, self._process = self._process, None
        if process is None:
            return
        for how, grace in ((signal.SIGTERM, 5), (signal.SIGKILL, 10))[not politely :]:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, how)
                process.wait(grace)

    def _ask(self, path: str, timeout: float, body: bytes | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=body, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return json.load(answer)
        except OSError:
            raise
        except (http.client.HTTPException, ValueError) as error:  # a server that dies in the middle of its answer
            raise ConnectionError(f"half an answer: {type(error).__name__}: {error}") from error

    def _wait_until_ready(self) -> None:
        start, deadline = time.monotonic(), Deadline(self.patience)
        while not deadline.passed():
            if _stopping.is_set():
                raise ServerFailed("interrupted")
            if not self.alive:
                raise ServerFailed(f"the server ended while starting\n{self._log_end()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                self.progress("starting")
                time.sleep(0.5)
        raise ServerFailed(f"the server was not ready after {time.monotonic() - start:.0f} s\n{self._log_end()}")

    def _log_end(self, lines: int = 25) -> str:
        return "\n".join([*self.log_text().splitlines()[-lines:], f"(log: {self.log})"])


def free_port() -> int:
    """A free port that leaves SGLang room for those it derives by adding up to 10000."""
    while True:
        port = random.randrange(20000, 50000)
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
