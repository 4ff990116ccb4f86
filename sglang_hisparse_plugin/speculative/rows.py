"""Where the KV rows of draft tokens live while they are verified, and where they go afterwards.

A request with L committed tokens is verified over positions L .. L+n-1, its draft tokens. Their rows are written to
slots hot_buffer_size + 1 .. hot_buffer_size + n of its buffer, the resident tail of the swap-in op. The n queries of a
request are n calls of that op, the last of which must not evict what the first has answered: rows named by one call
are the youngest of the LRU order, so n * top_k <= hot_buffer_size is enough.

After the pass all n rows are copied to the host slots of their positions and, where a position is within the hot
buffer, to the slot of that position. Which of them are accepted need not be known: a rejected row lies at or past the
end of the sequence, where nothing reads, and the next step writes over it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import upstream
from ..kernels.swap_in import swap_in
from ..observe import start


@dataclass(frozen=True)
class _Batch:
    """As much of SGLang's batch as is looked at."""

    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor


class VerifyRows:
    """The rows of one coordinator's requests under verification.

    Attributes:
        steps: n, queries of a request in one verification: its draft tokens.
        lengths: [steps, request slots] int64, tokens that each query of a batch sees.
        locs: [request slots, steps, top_k] int32, device rows answered to the queries. Both are at one address for
            ever: a CUDA graph reads and writes them there.
        answered: whether the op has moved rows already.
    """

    def __init__(self, coordinator: Any, steps: int) -> None:
        self.coordinator = coordinator
        self.steps = steps
        self.answered = False
        slots = coordinator.req_to_host_pool.shape[0]
        device = coordinator.req_to_device_buffer.device
        self.lengths = torch.zeros((steps, slots), dtype=torch.int64, device=device)
        self.locs = torch.full((slots, steps, coordinator.top_k), -1, dtype=torch.int32, device=device)
        self._columns = coordinator.device_buffer_size + 1 + torch.arange(steps, device=device)
        self._steps = torch.arange(steps, device=device)
        self._left: set[int] = set()
        counted = upstream.host_reserved(coordinator)
        self._counts = counted is None
        self._reserved = torch.zeros(slots, dtype=torch.int64) if counted is None else counted

    def missing(self, tokens: int) -> int:
        """Device rows that a staged prompt of `tokens`, whose own rows become its buffer, needs besides; 0 for none."""
        page = self.coordinator.mem_pool_device.page_size
        return max(0, int(self.coordinator.padded_buffer_size - -(-tokens // page) * page))

    def open(self, slot: int, tokens: int) -> None:
        """A request of `tokens` tokens, all of them in the host pool, starts to decode: complete its buffer.

        Raises:
            RuntimeError: the device pool is empty.
        """
        c = self.coordinator
        held = int(c.req_device_buffer_size[slot])
        if self._counts:
            self._reserved[slot] = tokens
        if held == c.padded_buffer_size:
            return
        rows = c.token_to_kv_pool_allocator.hisparse_attn_allocator.alloc(c.padded_buffer_size - held)
        if rows is None:
            raise RuntimeError(f"HiSparse: the device pool has no room for a buffer of {c.padded_buffer_size} rows")
        c.req_to_device_buffer[slot, held:] = rows
        c.req_device_buffer_token_locs[:, slot, held:] = rows.to(torch.int32)
        c.req_device_buffer_size[slot] = c.padded_buffer_size

    def prepare(self, lengths: Iterable[tuple[int, int]]) -> None:
        """A step is scheduled: each request of it, by slot, is to have host slots for so many positions.

        Raises:
            RuntimeError: the host pool is empty.
        """
        self._left.clear()
        for slot, length in lengths:
            self.reserve(slot, length)

    def reserve(self, slot: int, length: int) -> None:
        """Give every position below `length` a host slot, a page at a time; positions keep theirs until `close`.

        Raises:
            RuntimeError: the host pool is empty.
        """
        c = self.coordinator
        start = int(self._reserved[slot])
        if length <= start:
            return
        page = c.mem_pool_device.page_size
        stop = min(-(-length // page) * page, c.req_to_host_pool.shape[1])
        upstream.reserve_host(c, slot, start, stop)
        if self._counts:
            self._reserved[slot] = stop

    def reserved(self, slot: int) -> int:
        """Positions of a request that have a host slot; 0 while it is in staging, where nobody here counts them."""
        return int(self._reserved[slot])

    def close(self, slot: int, tokens: int) -> None:
        """A request of `tokens` logical slots ends: free the host slots past them, if nobody else counts them."""
        self._left.add(slot)
        if self._counts:
            upstream.free_host(self.coordinator, slot, tokens, int(self._reserved[slot]))
            self._reserved[slot] = 0

    def bind(self, batch: Any) -> None:
        """Before a verification: what is written to the draft tokens' logical slots goes to the tail.

        Requests that have been closed since `prepare` select nothing.

        Args:
            batch: req_pool_indices and seq_lens [requests] int64, the committed tokens of each; out_cache_loc
                [requests * steps] int64.
        """
        c = self.coordinator
        self.lengths.zero_()  # what DP attention pads with without CUDA graphs counts as real, and must select nothing
        lengths = batch.seq_lens + self._steps.unsqueeze(1) + 1
        self.lengths[:, : batch.seq_lens.size(0)] = lengths * self._stays(batch) if self._left else lengths
        batch = self._staying(batch)
        tail = c.req_to_device_buffer[batch.req_pool_indices.unsqueeze(1), self._columns]
        c.mem_pool_device.full_to_hisparse_device_index_mapping[batch.out_cache_loc] = tail.flatten()
        upstream.settled(c)

    def swap_in(self, layer: int, batch: Any, selected: Tensor) -> Tensor:
        """Device rows of what the queries of a verification selected, in one layer.

        Args:
            batch: as for `bind`, which came before; padding included.
            selected: [at least requests * steps, top_k] int32, positions, -1 for none.

        Returns:
            The same shape, int32; -1 where nothing was selected.
        """
        c = self.coordinator
        requests = batch.req_pool_indices.size(0)
        queries = selected[: requests * self.steps].unflatten(0, (requests, self.steps))
        locs = self.locs[:requests]
        tables = {
            "device_buffer_tokens": c.req_device_buffer_tokens[layer],
            "host_cache_locs": c.req_to_host_pool,
            "device_buffer_locs": c.req_device_buffer_token_locs[layer],
            "host_cache": c.mem_pool_host.kv_buffer[layer],
            "device_buffer": c.mem_pool_device.kv_buffer[layer],
            "req_pool_indices": batch.req_pool_indices,
            "lru_slots": c.lru_slots[layer],
            "item_size_bytes": c.mem_pool_host.token_stride_size,
            "num_top_k": c.top_k,
            "hot_buffer_size": c.device_buffer_size,
            "num_real_reqs": c.num_real_reqs,
            "tail_start": batch.seq_lens,
        }
        for step in range(self.steps):
            call = tables | {
                "top_k_tokens": queries[:, step],
                "top_k_device_locs": locs[:, step],
                "seq_lens": self.lengths[step, :requests],
            }
            swap_in(**call, counters=start.counters_for(call))
            self.answered = True
        padding = selected.size(0) - requests * self.steps
        answered = locs.flatten(0, 1)
        return torch.nn.functional.pad(answered, (0, 0, 0, padding), value=-1) if padding else answered

    def settle(self, batch: Any) -> None:
        """After a verification: rows go to the host pool and, within the hot buffer, to the slots of their positions.

        Args:
            batch: as for `bind`, of which nothing has changed.
        """
        c, batch = self.coordinator, self._staying(batch)
        if not batch.seq_lens.size(0):
            return  # a copy of nothing is no kernel that could be launched
        slots = batch.req_pool_indices.unsqueeze(1)
        positions = batch.seq_lens.unsqueeze(1) + self._steps
        tail = c.req_to_device_buffer[slots, self._columns]
        place = c.req_to_device_buffer[slots, positions.clamp(max=c.device_buffer_size)]
        home = torch.where(positions < c.device_buffer_size, place, tail)
        host = c.req_to_host_pool[slots, positions]
        c.mem_pool_device.transfer_values_on_device(home.flatten(), tail.flatten())
        # not `[...] = 0`, which copies a number from the host and waits until the verification has ended
        c.mem_pool_device.full_to_hisparse_device_index_mapping.index_fill_(0, batch.out_cache_loc, 0)
        upstream.back_up(c, host.flatten(), tail.flatten())

    def _staying(self, batch: Any) -> Any:
        """Without the requests that were closed after the step was scheduled: their slots are nobody's or another's.

        The overlap scheduler has the next step scheduled when it looks at the result of one, in which a request may
        end; and where a grammar is to be obeyed, SGLang looks before it runs that step. Only then does this wait for
        the device.
        """
        if not self._left:
            return batch
        stays = self._stays(batch)
        locs = batch.out_cache_loc.view(-1, self.steps)[stays].flatten()
        return _Batch(batch.req_pool_indices[stays], batch.seq_lens[stays], locs)

    def _stays(self, batch: Any) -> Tensor:
        """[requests] bool."""
        slots = batch.req_pool_indices
        return torch.isin(slots, torch.tensor([*self._left], device=slots.device), invert=True)
