"""What can happen to one of two servers, or to a request between them, while the other goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from . import checks, language, manners, probe, walks
from .patience import Deadline
from .pd_servers import Pair
from .report import Report
from .scales import Scale
from .server import Server, ServerFailed
from .walks import Walk

SETTLED = 60  #: seconds in which who waits for a server that is gone must have an answer


def aborted_while_waiting(report: Report, pair: Pair, scale: Scale, meanwhile: Callable[[], None]) -> None:
    """At either server, of a request that the other has never heard of; the answers may take as long as `meanwhile`."""
    prompt = walks.crowd(scale, 1)[0]
    at_decode, at_prefill = pair.apart(*prompt)[0], pair.apart(*prompt)[1]
    with pair.threads(2) as pool:
        replies = [pool.submit(walks.reply, client.generate) for client in (at_decode, at_prefill)]
        _holds_something(pair.decode)
        time.sleep(1)  # the prefill server takes nothing for a request before the other one asks for it
        at_decode.abort()
        at_prefill.abort()
        meanwhile()
        for where, client, reply in zip(("decode", "prefill"), (at_decode, at_prefill), replies, strict=True):
            what = manners.judge(client, reply.result(), aborted=True)
            report.add(f"aborted while it waits at the {where} server: answered so", what == "aborted", what)
    balance(report, pair, "after aborts")


@dataclass(frozen=True)
class Late:
    """KV came for a request that the decode server had been told to give up, while another decoded."""

    other: Walk
    """Until the KV had been there for a lap, or to its end."""
    gone: str
    """What became of the request that was given up."""
    seconds: float
    """From its abort until its KV was there."""
    meanwhile: bool
    """The other decoded for a whole lap after that, in which every row that it ever needs is needed."""
    unsent: str = ""
    """The prefill server's answer, if it is an error, and it sent nothing."""

    def __str__(self) -> str:
        if self.unsent:
            return f"the prefill server knows, and sends nothing: {self.unsent[:120]}; the other is {self.other}"
        return f"{self.other}; {self.seconds:.0f} s late{'' if self.meanwhile else ', after the other had ended'}"


def comes_late(pair: Pair, scale: Scale, told: bool) -> Late:
    """The decode server is told to give a request up, serves others, and then the prefill server sends its KV.

    Args:
        told: it has told the prefill server, which is waited for no longer than the other request takes.
    """
    gone, late = pair.apart(language.prompt(scale.crowd[1], seed=3000), 1)
    prompt = language.prompt(scale.long[-1], seed=3001)
    other = pair.request(prompt, scale.context - len(prompt) - 1)
    with pair.threads(2) as pool:
        given_up = pool.submit(walks.reply, gone.generate)
        _holds_something(pair.decode)
        gone.abort()
        since = time.monotonic()
        _use_up(pair, scale, but=scale.crowd[1])
        sent: Future[tuple[float, str]] | None = None
        after = 0

        def send() -> tuple[float, str]:
            reply = walks.reply(late.generate)
            return time.monotonic() - since, reply.error or "aborted" * (reply.ended == "abort")

        def token() -> None:
            nonlocal sent, after
            sent = sent or pool.submit(send)
            after += sent.done()
            if after > scale.steps:
                other.leave()

        walk = walks.begun(other, walks.reply(partial(other.stream, 1, token)))
        if told:
            late.abort()
        seconds, unsent = sent.result() if sent else (0.0, "")
        what = manners.judge(gone, given_up.result(), aborted=True)
        return Late(walk, what, seconds, after > scale.steps, unsent)


def _use_up(pair: Pair, scale: Scale, but: int) -> None:
    """Have host slots used once, nearly all but the last: the pool gives out first what has been free for longest."""
    left = pair.decode.internal_state()[probe.KEY]["start"]["host slots"] - but
    length = scale.crowd[0]
    while left > length:
        walks.ask(pair.decode, language.prompt(length, seed=left), 1)
        left -= length


def _once(act: Callable[[], object]) -> Callable[[], None]:
    """Does `act` when it is called first."""
    called = False

    def once() -> None:
        nonlocal called
        if not called:
            called = True
            act()

    return once


def prefill_restarted(report: Report, pair: Pair, scale: Scale) -> None:
    """With one request decoding, and one waiting for KV."""
    prompt = walks.long(scale)[-1]
    waiting, running = pair.apart(*prompt)[0], pair.request(*prompt)
    with pair.threads(1) as pool:
        unserved = pool.submit(walks.reply, waiting.generate)
        _holds_something(pair.decode)
        kill = _once(lambda: pair.prefill.stop(politely=False))
        walk = walks.of(running, walks.reply(lambda: running.stream(2, kill)))
        report.add("the prefill server is gone: what was decoding is decoded to its end", walk.exact, str(walk))
        _, late = wait([unserved], SETTLED)
        waiting.abort()
        error = unserved.result().error
    report.add(
        "the prefill server is gone: who waits for it is answered with an error", not late and bool(error), error[:200]
    )
    pair.restart_prefill()
    answers = [walks.ask(pair.decode, *each) for each in walks.crowd(scale, scale.slots)]
    checks.all_exact(report, "a new prefill server with the old decode server: walks are exact", answers)


def balance(report: Report, pair: Pair, when: str) -> None:
    for where, server in (("decode", pair.decode), ("prefill", pair.prefill)):
        checks.pools_balance(report, server, f"{where} server: pools are balanced {when}")


def _holds_something(server: Server) -> None:
    """Wait until the server has slots in use."""
    deadline = Deadline(server.patience)
    while not deadline.passed():
        state = server.internal_state()[probe.KEY]
        if state["now"] != state["start"]:
            return
        time.sleep(0.05)
    raise ServerFailed(f"{server.log.stem} took up nothing\n{server.last_exception()}")
