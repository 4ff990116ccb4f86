"""Whether draft tokens fit the buffers, and the buffers the device pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .problem import Problem

LEAST = 2  #: draft tokens; one is no draft
OWN_MOST, OWN_LEAST_TOP_K, OWN_ROWS = 4, 1024, 8192  #: draft tokens, top-k and their product that SGLang's kernel takes
#: Draft tokens up to which n calls of our op take less than SGLang's kernel, in all cells that were measured on an
#: H200: with 2 by 1.09 to 2.2 times, with 3 by 1.02 to 1.4; with 4 only where much is missed (docs/speculative.md).
FASTER = 3


@dataclass(frozen=True)
class Sizes:
    """What is asked of the pools; None: not known yet."""

    steps: int
    """Draft tokens of a request."""
    top_k: int
    """Tokens that a query selects."""
    hot_buffer: int
    page: int
    slots: int | None = None
    """Requests that may run at once."""
    rows: int | None = None
    """Of the device pool."""

    @classmethod
    def of_pools(cls, coordinator: Any, steps: int) -> Sizes:
        """As they have been built."""
        return cls(
            steps,
            coordinator.top_k,
            coordinator.device_buffer_size,
            coordinator.mem_pool_device.page_size,
            coordinator.req_to_token_pool.size,
            coordinator.token_to_kv_pool_allocator.hisparse_attn_allocator.size,
        )


def sizes(s: Sizes) -> Iterator[Problem]:
    """Where draft tokens do not fit the buffers, or the buffers the device pool."""
    yield from _too_few(s)
    most = s.hot_buffer // s.top_k
    if s.steps > most:
        yield Problem(
            f"{s.steps} draft tokens select up to {s.steps} x {s.top_k} rows, the hot buffer has {s.hot_buffer}",
            f"set device_buffer_size to {s.steps * s.top_k} or more in --hisparse-config"
            + (f", or --speculative-num-steps to {most - 1}" if most > 1 else ""),
        )
    if s.steps > s.page - 1:
        yield Problem(
            f"{s.steps} draft tokens do not fit an extra page of {s.page} rows: at most {s.page - 1}",
            f"set --speculative-num-steps to {s.page - 2} or less",
        )
    buffer = s.hot_buffer + s.page
    if s.slots is not None and s.rows is not None and s.slots * buffer > s.rows:
        fit = s.rows // buffer
        remedy = f"set --max-running-requests to {fit}" if fit else "give the KV cache more memory"
        yield Problem(
            f"each request has a whole buffer of {buffer} rows from its first step on; {s.slots} of them "
            f"need {s.slots * buffer} rows and the device pool has {s.rows}",
            f"{remedy}, or a smaller device_buffer_size in --hisparse-config",
        )


def sizes_of_sglang(s: Sizes) -> Iterator[Problem]:
    """What SGLang's own way says when its pools are built; more than the buffer holds goes to scratch rows."""
    yield from _too_few(s)
    if s.steps > OWN_MOST:
        yield Problem(
            f"{s.steps} draft tokens are not among the {LEAST} to {OWN_MOST} that this SGLang's kernel takes",
            f"set --speculative-num-steps to {OWN_MOST - 1} or less",
        )
    elif s.steps * s.top_k > OWN_ROWS:
        most = OWN_ROWS // s.top_k
        yield Problem(
            f"{s.steps} draft tokens x a top_k of {s.top_k} exceed the {OWN_ROWS} rows that this SGLang's kernel takes",
            f"set --speculative-num-steps to {most - 1}" if most >= LEAST else "leave --speculative-algorithm out",
        )
    if s.top_k < OWN_LEAST_TOP_K:
        yield Problem(
            f"the top_k is {s.top_k}, and this SGLang's kernel takes {OWN_LEAST_TOP_K} or more",
            "leave --speculative-algorithm out, or install 0.5.10 to 0.5.15",
        )
    slots = s.slots and (s.slots if s.rows is None else min(s.slots, s.rows // 2))  # as SGLang bounds them
    if slots and slots + 1 > s.hot_buffer:
        yield Problem(
            f"{slots} requests of a rank and one slot more exceed the device_buffer_size of {s.hot_buffer}",
            f"set --max-running-requests to {s.hot_buffer - 1} or less for each rank",
        )


def ours_verifies(steps: int, top_k: int, hot_buffer: int) -> bool:
    """Whether SGLang's own way is better served by calls of our op: they are faster, and the last evicts no answer."""
    return steps <= FASTER and steps * top_k <= hot_buffer


def verifier(s: Sizes, *, applied: bool) -> str:
    """Whose kernel answers the queries of SGLang's own way, and why; `applied`: the overlay swap-in."""
    ours = applied and ours_verifies(s.steps, s.top_k, s.hot_buffer)
    if not applied:
        why = "overlay swap-in is not applied"
    elif ours:
        why = f"faster up to {FASTER}"
    elif s.steps <= FASTER:
        why = f"{s.steps} x {s.top_k} rows exceed the hot buffer of {s.hot_buffer}"
    else:
        why = f"the plugin's is faster up to {FASTER} only"
    return f"{s.steps} draft tokens are verified by {'the plugin' if ours else 'SGLang'}'s swap-in kernel: {why}"


def _too_few(s: Sizes) -> Iterator[Problem]:
    if s.steps < LEAST:
        yield Problem(
            f"draft tokens of a request are {s.steps}, the one that is known included, so that none is verified",
            "set --speculative-num-steps to 1 or more",
        )
