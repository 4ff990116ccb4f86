"""A prefill and a decode server, and the requests that go to both."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .client import Client, Reply
from .pd_transport import ENVIRONMENT, LOOPBACK, Transport
from .server import Answer, Server, free_port
from .setup import Launcher

NO_PREFILL = "2.2.2.2"  #: SGLang's own bootstrap host of a request that no KV comes for


class Decode(Server):
    """A server that decodes what another has prefilled; what asks it asks both."""

    def __init__(self, server: Server, pair: Pair) -> None:
        super().__init__(server.command, server.env, server.log, server.patience, server.progress)
        self.pair = pair

    def client(self, tokens: list[int], steps: int, rid: str | None = None) -> Client:
        return self.pair.request(tokens, steps, rid)

    def generate(
        self, tokens: list[int], steps: int, rid: str | None = None, rank: int | None = None, temperature: float = 0
    ) -> Answer:
        """As a server's, of one rank and greedily."""
        assert rank is None and not temperature
        reply = self.client(tokens, steps, rid).generate()
        if reply.error or not reply.ended:
            raise ConnectionError(reply.error or "half an answer")
        return Answer(reply.tokens, 0)


class Request(Client):
    """One request at both servers, as a router sends it; what comes back is the decode server's.

    Args:
        decode, prefill: the same request at each of them.
        prefills: is told what the prefill server answers.
    """

    def __init__(self, decode: Client, prefill: Client, prefills: Prefills) -> None:
        super().__init__(decode.url, decode.rid, decode.tokens, decode.steps, decode.patience, decode.more)
        self.prefill, self.prefills = prefill, prefills

    def generate(self) -> Reply:
        with self.prefills.asked(self.prefill):
            return super().generate()

    def stream(self, after: int | None = None, then: Callable[[], None] = lambda: None) -> Reply:
        with self.prefills.asked(self.prefill):
            return super().stream(after, then)

    def send_and_leave(self, after: float) -> None:
        with self.prefills.asked(self.prefill):
            super().send_and_leave(after)
            self.prefill.abort()

    def abort(self, again: bool = False) -> None:
        super().abort(again)
        self.prefill.abort(again)

    def leave(self) -> None:
        super().leave()
        self.prefill.abort()


@dataclass
class Prefills:
    """What the prefill server answered."""

    answered: int = 0
    unanswered: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def asked(self, client: Client) -> Iterator[None]:
        """Ask meanwhile, wait for the answer, and give the request up if there is none once the other side is done."""
        thread = threading.Thread(target=self._ask, args=(client,))
        thread.start()
        try:
            yield
        finally:
            while thread.is_alive():
                thread.join(1)
                if thread.is_alive():
                    client.abort(again=True)

    def _ask(self, client: Client) -> None:
        try:
            client.generate()
        except OSError as error:
            with self._lock:
                self.unanswered.append(f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                self.answered += 1


class Pair:
    """Both servers of one SGLang, started together; each can be ended and started anew while the other serves on.

    Args:
        skip: overlays left out on the first decode server.
    """

    def __init__(self, launcher: Launcher, transport: Transport, skip: str = "") -> None:
        self.launcher, self.transport = launcher, transport
        self.bootstrap_port = free_port()
        self.prefills = Prefills()
        self._starts = 0
        self.prefill = self._prefill()
        self.decode = self._decode(skip)

    @contextmanager
    def running(self) -> Iterator[Pair]:
        """Both up; both ended at the end."""
        try:
            with self.threads(2) as pool:
                list(pool.map(Server.__enter__, self._servers()))
            yield self
        finally:
            self._stop()

    @contextmanager
    def threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """For what waits for the servers: after an exception it waits no longer, for there are none."""
        with ThreadPoolExecutor(count) as pool:
            try:
                yield pool
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        for server in self._servers():
            server.stop()

    def _servers(self) -> list[Server]:
        return [self.prefill, self.decode] if self.transport.carries else [self.decode]

    def restart_decode(self) -> None:
        """End it as a crash would, if it lives, and start another, with every overlay."""
        self.decode.stop(politely=False)
        self.decode = self._decode()
        self.decode.__enter__()

    def restart_prefill(self) -> None:
        """The same of the prefill server."""
        self.prefill.stop(politely=False)
        self.prefill = self._prefill()
        self.prefill.__enter__()

    def request(self, tokens: list[int], steps: int, rid: str | None = None) -> Client:
        """One that goes to both, not yet sent; without a transport to the decode server alone."""
        decode, prefill = self.apart(tokens, steps, rid)
        return Request(decode, prefill, self.prefills) if self.transport.carries else decode

    def apart(self, tokens: list[int], steps: int, rid: str | None = None) -> tuple[Client, Client]:
        """One request for each server, the decode server's first."""
        more: dict[str, Any] = {
            "bootstrap_host": LOOPBACK if self.transport.carries else NO_PREFILL,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(62),
        }
        rid = rid or uuid.uuid4().hex
        at_decode, at_prefill = (
            Client(f"http://{LOOPBACK}:{server.port}", rid, tokens, steps, server.answer_patience, more)
            for server in (self.decode, self.prefill)
        )
        return at_decode, at_prefill

    def _prefill(self) -> Server:
        server = self._apart("prefill", self.launcher.server(self._name("prefill"), hisparse=False))
        server.command.append(f"--disaggregation-bootstrap-port={self.bootstrap_port}")
        return server

    def _decode(self, skip: str = "") -> Decode:
        server = self.launcher.server(self._name("decode"), retract=True, skip=skip)
        return Decode(self._apart("decode", server), self)

    def _apart(self, mode: str, server: Server) -> Server:
        flags = [f"--disaggregation-mode={mode}", f"--disaggregation-transfer-backend={self.transport.backend}"]
        server.command = server.command + flags
        server.env = server.env | ENVIRONMENT
        return server

    def _name(self, role: str) -> str:
        self._starts += 1
        return f"{role}-{self._starts}"
