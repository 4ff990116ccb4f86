"""Servers that are used in turn, and on a GPU start side by side: there, compilers take most of a start's time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from .server import Server

Up = contextlib.AbstractContextManager[Server]  #: a server that is ready when this is entered


class SideBySide:
    """Context manager around servers, none of which outlives it.

    Args:
        servers: none of them started.
        at_once: whether `begin` starts them; otherwise each starts when it is used.
    """

    def __init__(self, servers: Sequence[Server], at_once: bool) -> None:
        self._servers, self._at_once = servers, at_once
        self._pool = ThreadPoolExecutor(max(1, len(servers)))
        self._starts: dict[Server, Future[Server]] = {}

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.stop()
        self._pool.shutdown()

    def begin(self) -> None:
        """Start all of them, if that is done at once; without it each starts when it is used."""
        if self._at_once:
            self._starts = {server: self._pool.submit(server.__enter__) for server in self._servers}

    @contextlib.contextmanager
    def up(self, server: Server) -> Iterator[Server]:
        """The server, ready; stopped on leaving.

        Raises:
            ServerFailed: it did not come up.
        """
        with contextlib.ExitStack() as stack:
            if start := self._starts.get(server):
                stack.callback(server.stop)
                start.result()
            else:
                stack.enter_context(server)
            yield server
