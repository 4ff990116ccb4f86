"""A ring on the device into which selections go, and the tap through which a thread reads it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .aside import Aside
from .tracefile import HEAD

BYTES = 64 << 20  # of device memory, or twice a full batch if that is more
PIECE = 4 << 20  # of pinned host memory, through which rows are read


class Ring:
    """Rows of ``[layer, slot, generation, length, tokens...]`` int32 on the device, oldest overwritten first.

    Args:
        layers: which are recorded.
        slots: request slots of the coordinator: no call appends more rows.
        top_k: tokens per row.
    """

    def __init__(self, layers: tuple[int, ...], slots: int, top_k: int, device: torch.device) -> None:
        self.layers, self.top_k, self.device = layers, top_k, device
        self.width = HEAD + top_k
        self.capacity = max(64, 2 * slots, BYTES // (4 * self.width))
        self.safe = self.capacity - slots  # rows that stay as they are while a call appends
        # One more row takes what is not to be kept: padding, and everything while nothing is recorded.
        self.rows = torch.zeros(self.capacity + 1, self.width, dtype=torch.int32, device=device)
        self.written = torch.zeros(1, dtype=torch.int64, device=device)
        self.armed = torch.zeros(1, dtype=torch.int64, device=device)
        self.generation = torch.zeros(slots, dtype=torch.int32, device=device)

    def append(self, layer: int, slots: Tensor, lengths: Tensor, tokens: Tensor, real: Tensor | None) -> None:
        """Add a call. Nothing is read back, so it can be captured; allocations come from the graph's own pool."""
        batch = tokens.size(0)
        at = torch.arange(batch, device=self.device)
        kept = self.armed.expand(batch) if real is None else (at < real) * self.armed
        place = torch.where(kept > 0, (self.written + at) % self.capacity, self.capacity)
        slots = slots.long()
        heads = (torch.full_like(at, layer), slots, self.generation[slots], lengths)
        row = torch.cat([torch.stack([head.int() for head in heads], 1), tokens[:, : self.top_k].int()], 1)
        self.rows.index_copy_(0, place, row)
        self.written += kept.sum()


class Tap:
    """Reads a ring aside. Made before the server serves."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._aside = ring, Aside(ring.device)
        self._number = self._aside.host(1, dtype=torch.int64)
        self._piece = self._aside.host(max(1, PIECE // (4 * ring.width)), ring.width, dtype=torch.int32)

    def arm(self, on: bool) -> None:
        """Let calls from now on go into the ring, or not."""
        self._aside.do(lambda: self._ring.armed.fill_(int(on)))

    def written(self) -> int:
        """How many rows went into the ring so far, the overwritten ones included."""
        return int(self._aside.copy(self._number, self._ring.written))

    def rows(self, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows number `start` to ``end - 1`` in pieces: how many were overwritten before a piece, and the piece.

        A piece is [rows, width] int32 on the host, to be used before the next is asked for.
        """
        ring = self._ring
        while start < end:
            at = start % ring.capacity
            number = min(end - start, ring.capacity - at, self._piece.size(0))
            piece = self._aside.copy(self._piece[:number], ring.rows[at : at + number])
            first = min(end, max(start, self.written() - ring.safe))  # what is older may be another row by now
            yield first - start, piece[first - start :]
            start = max(first, start + number)
