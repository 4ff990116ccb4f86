"""A trace, served by hot buffers of other sizes: the policy of ``kernels/reference.py``, without rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .tracefile import HEAD, Trace

LONGEST_STEP = 64  #: tokens that a request can gain between two of its rows


@dataclass
class Outcome:
    """What a hot buffer of one size would have done."""

    hot_buffer: int
    calls: int = 0
    """Requests served, once per step and layer."""
    hits: int = 0
    misses: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 1.0

    @property
    def misses_per_call(self) -> float:
        return self.misses / self.calls if self.calls else 0.0


class HotBuffer:
    """Tokens of one request in one layer, next to be evicted first. A new one holds tokens 0, 1, ... in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: NDArray[np.int64] = np.arange(size)
        self.generation, self.length, self.calls = 0, 0, 0

    def serves(self, generation: int, length: int) -> bool:
        """Whether a row can be this request's next: its last row may be recorded after its slot was given up."""
        return generation == self.generation and self.length < length <= self.length + LONGEST_STEP

    def select(self, tokens: NDArray[np.int32], length: int) -> tuple[int, int]:
        """Serve a selection; returns hits and misses as the kernel's counters count them.

        A sequence of at most `size` tokens is all there; the newest token has a place of its own.
        """
        valid = tokens[(tokens >= 0) & (tokens < length)].astype(np.int64)
        if length <= self.size:
            return valid.size, 0
        wanted = np.zeros(length, dtype=bool)
        wanted[valid] = True
        wanted[length - 1] = False
        held = (self.order >= 0) & (self.order < length)
        hit = np.zeros(self.size, dtype=bool)
        hit[held] = wanted[self.order[held]]
        wanted[self.order[hit]] = False
        first = np.sort(np.unique(valid, return_index=True)[1])
        missed = valid[first]
        missed = missed[wanted[missed]]  # in the order of the top-k
        stale = self.order[~hit]
        self.order = np.concatenate([stale[missed.size :], missed, self.order[hit]])
        return valid.size - missed.size, missed.size


def replay(traces: Sequence[Trace], size: int, warm_up: int) -> Outcome:
    """Serve the traces with hot buffers of `size` tokens; the first `warm_up` calls of a request are not counted."""
    outcome = Outcome(size)
    for trace in traces:
        _serve(trace, outcome, warm_up)
    return outcome


def _serve(trace: Trace, outcome: Outcome, warm_up: int) -> None:
    buffers: dict[tuple[int, int], HotBuffer] = {}
    for row in trace.rows:
        layer, slot, generation, length = (int(n) for n in row[:HEAD])
        buffer = buffers.get((layer, slot))
        if buffer is None or not buffer.serves(generation, length):
            buffer = buffers[layer, slot] = HotBuffer(outcome.hot_buffer)
        hits, misses = buffer.select(row[HEAD:], length)
        buffer.generation, buffer.length, buffer.calls = generation, length, buffer.calls + 1
        if buffer.calls > warm_up:
            outcome.calls += 1
            outcome.hits += hits
            outcome.misses += misses
