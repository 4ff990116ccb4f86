"""Walks that a server makes, one at a time or many together."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from . import language
from .client import Client, Reply
from .scales import Scale
from .server import Server

Prompt = tuple[list[int], int]  #: tokens, and how many to generate


@dataclass(frozen=True)
class Walk:
    """A prompt, its right continuation, and what came back."""

    tokens: list[int]
    right: list[int]
    got: list[int] | None
    error: str = ""
    verifications: int = 0
    """Passes in which drafts were verified."""

    @property
    def exact(self) -> bool:
        return self.got == self.right

    @property
    def break_at(self) -> int | None:
        """The first step whose token is wrong or missing; None for an exact walk or no answer."""
        if self.got is None or self.exact:
            return None
        pairs = zip(self.got, self.right, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.got), len(self.right)))

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        return f"no answer ({self.error})" if self.got is None else f"wrong from step {self.break_at}"


def long(scale: Scale) -> list[Prompt]:
    return [(language.prompt(length, seed), scale.steps) for seed, length in enumerate(scale.long)]


def contexts(scale: Scale) -> str:
    """How long those are."""
    return f"contexts {' and '.join(f'{length / scale.hot_buffer:.0f}x' for length in scale.long)} the hot buffer"


def crowd(scale: Scale, size: int) -> list[Prompt]:
    rng = random.Random(0)
    return [(language.prompt(rng.randint(*scale.crowd), seed=100 + i), scale.crowd_steps) for i in range(size)]


def first_step_beyond(tokens: list[int], hot_buffer: int) -> tuple[int, int]:
    """The first step, after a few, that needs a row which the hot buffer did not hold at the start; and that row."""
    needed = ((step, language.needed_position(tokens, step)) for step in range(8, language.STAGES))
    return next((step, position) for step, position in needed if position > hot_buffer)


def ask(  # noqa: PLR0917 (what may be asked for)
    server: Server,
    tokens: list[int],
    steps: int,
    rid: str | None = None,
    rank: int | None = None,
    temperature: float = 0,
) -> Walk:
    """The walk that the server makes of a prompt; see `Server.generate`."""
    right = language.walk(tokens, steps)
    try:
        answer = server.generate(tokens, steps, rid, rank, temperature=temperature)
    except OSError as error:
        return Walk(tokens, right, None, str(error) or type(error).__name__)
    return Walk(tokens, right, answer.tokens, verifications=answer.verifications)


def reply(ask: Callable[[], Reply]) -> Reply:
    """What `ask` brings, or a reply that says why there is none."""
    try:
        return ask()
    except OSError as error:
        return Reply(error=f"no answer: {error or type(error).__name__}")


def of(request: Client, reply: Reply) -> Walk:
    """The walk that is the whole reply to a request."""
    whole = reply.ended and not reply.error
    return Walk(
        request.tokens, language.walk(request.tokens, request.steps), reply.tokens if whole else None, reply.error
    )


def begun(request: Client, reply: Reply) -> Walk:
    """The walk that a reply has begun, as far as it has come."""
    right = language.walk(request.tokens, request.steps)[: len(reply.tokens)]
    return Walk(request.tokens, right, None if reply.error else reply.tokens, reply.error)


def together(server: Server, prompts: list[Prompt]) -> list[Walk]:
    """The walks of prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        try:
            return list(pool.map(lambda prompt: ask(server, *prompt), prompts))
        except BaseException:  # interrupted: without the server no thread waits for its answer
            server.stop()
            raise
