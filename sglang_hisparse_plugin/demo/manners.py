"""What a client does with a request, and what then became of it."""

from __future__ import annotations

import random
import re
import threading

from . import language
from .client import Client, Reply

GOOD = ("exact", "aborted", "disconnected", "refused")  #: what may become of a request
RETRACTED = re.compile("retract", re.I)  #: by a PD decode server, and to be sent again; each request fits by itself
ABORTED = re.compile(r"abort", re.I)  #: what the answer to an abort says, if it says anything


def _walk(request: Client, _: random.Random) -> str:
    return judge(request, request.generate(), aborted=False)


def _stream(request: Client, _: random.Random) -> str:
    return judge(request, request.stream(), aborted=False)


def _abort_streaming(request: Client, rng: random.Random) -> str:
    """After a few tokens, or none."""
    return judge(request, request.stream(rng.randint(0, request.steps), request.abort), aborted=True)


def abort_soon(request: Client, rng: random.Random) -> str:
    """At any time: in the queue, in prefill, in staging, in decode, or when it has ended.

    Again every second until there is an answer: an abort that overtakes its request is lost, and where the prefill
    server alone has heard of it, the decode server waits for KV for 300 seconds.
    """
    answered = threading.Event()

    def insist() -> None:
        answered.wait(rng.expovariate(1.0))
        while not answered.is_set():
            request.abort(again=True)
            answered.wait(1)

    thread = threading.Thread(target=insist)
    thread.start()
    try:
        return judge(request, request.generate(), aborted=True)
    finally:
        answered.set()
        thread.join()


def _leave_streaming(request: Client, rng: random.Random) -> str:
    reply = request.stream(rng.randint(0, request.steps), request.leave)
    return "disconnected" if reply.left and _prefix(request, reply) else judge(request, reply, aborted=False)


def _leave_at_once(request: Client, rng: random.Random) -> str:
    request.send_and_leave(rng.uniform(0, 1))
    return "disconnected"


KINDS = {
    "walk": _walk,
    "stream": _stream,
    "abort while streaming": _abort_streaming,
    "abort at any time": abort_soon,
    "leave while streaming": _leave_streaming,
    "leave at once": _leave_at_once,
}


def judge(request: Client, reply: Reply, aborted: bool) -> str:
    """What became of a request."""
    right = language.walk(request.tokens, request.steps)
    if reply.tokens == right:
        return "exact"
    if reply.ended == "abort" or reply.error:
        if not _prefix(request, reply):
            return "wrong tokens before its abort"
        if aborted and (not reply.error or ABORTED.search(reply.error)):
            return "aborted"
        return "refused" if RETRACTED.search(reply.error) else f"error: {reply.error[:200]}"
    broken = next((i for i, (a, b) in enumerate(zip(reply.tokens, right, strict=False)) if a != b), len(reply.tokens))
    return f"ended by {reply.ended or 'nothing'}, wrong from step {broken}"


def _prefix(request: Client, reply: Reply) -> bool:
    return reply.tokens == language.walk(request.tokens, request.steps)[: len(reply.tokens)]
