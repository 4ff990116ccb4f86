"""A small serving world: request tables and caches on a device, and the oracle's picture of the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import torch

POISON_LOC = 0x5EED  # what no output entry may keep
COUNTED = [10 * i for i in range(18)]  # what the counters hold before a call


@dataclass(frozen=True)
class Call:
    """One call of an op: what the oracle is told, and what the op is given."""

    requests: list[int]
    top_k: list[list[int]]
    seq_lens: list[int]
    real: int
    tails: list[int] | None
    options: dict[str, torch.Tensor]
    arguments: dict[str, Any]


class World:
    """`requests` requests of up to `context` tokens, their hot buffers, and rows of `item` bytes.

    The rows of both caches are `stride` bytes apart and start `offset` bytes into their allocation. Every byte that no
    call may touch is compared after every step.
    """

    def __init__(
        self,
        *,
        requests: int,
        context: int,
        top_k: int,
        hot: int,
        item: int = 16,
        stride: int | None = None,
        offset: int = 0,
        page: int = 4,
        device: str = "cpu",
        index_dtype: torch.dtype = torch.int64,
        length_dtype: torch.dtype = torch.int32,
        seed: int = 0,
    ) -> None:
        self.top_k, self.hot, self.item, self.context, self.device = top_k, hot, item, context, device
        self.page, self.requests = page, requests
        self.index_dtype, self.length_dtype = index_dtype, length_dtype
        self.rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        stride = item if stride is None else stride
        width = hot + 1 + page

        def bytes_of(rows: int) -> torch.Tensor:
            return torch.randint(0, 256, (offset + rows * stride,), dtype=torch.uint8, generator=generator)

        def rows_of(raw: torch.Tensor) -> torch.Tensor:
            return raw[offset:].view(-1, stride)

        raw_host, raw_cache = bytes_of(requests * context), bytes_of(requests * width)
        host_locs = torch.randperm(requests * context, generator=generator).view(requests, context)
        locs = torch.randperm(requests * width, generator=generator).view(requests, width)
        lru = torch.stack([torch.randperm(hot, generator=generator) for _ in range(requests)])
        tokens = torch.full((requests, width), -1)
        for request in range(requests):  # a buffer whose slots hold some tokens, and their rows
            held = torch.randperm(context, generator=generator)[:hot]
            held = torch.where(torch.rand(held.shape, generator=generator) < 0.9, held, -1)
            tokens[request, : held.numel()] = held
            slots = torch.nonzero(held >= 0).flatten()
            rows = rows_of(raw_host)[host_locs[request, held[slots]], :item]
            rows_of(raw_cache)[locs[request, slots], :item] = rows
        if device == "cuda":
            raw_host, raw_cache = raw_host.pin_memory(), raw_cache.cuda()
        self.host, self.cache = rows_of(raw_host), rows_of(raw_cache)
        self.host_locs, self.locs = host_locs.to(device), locs.int().to(device)
        self.lru, self.tokens = lru.short().to(device), tokens.int().to(device)

        self.host_rows = [bytes(row) for row in self.host.cpu().numpy()]
        self.expected_rows = [bytearray(row) for row in self.cache.cpu().numpy()]
        self.expected = [
            oracle.Tables(tokens[r].tolist(), lru[r].tolist(), locs[r].tolist(), host_locs[r].tolist())
            for r in range(requests)
        ]

    def fill_in_order(self, request: int) -> None:
        """Slots 0 .. hot-1 hold tokens 0 .. hot-1, as after a short prompt."""
        held = torch.arange(min(self.hot, self.context))
        self.tokens[request, : held.numel()] = held.int().to(self.device)
        self.expected[request].tokens[: held.numel()] = held.tolist()

    def step(
        self,
        op: Callable[..., Any],
        requests: list[int],
        top_k: list[list[int]],
        seq_lens: list[int],
        *,
        real: int | None = None,
        tails: list[int] | None = None,
        plan: bool = False,
        counters: bool = False,
        skip_io: bool = False,
    ) -> None:
        """Call `op` on a batch and compare everything it may and may not write with the oracle."""
        call = self.call(requests, top_k, seq_lens, real=real, tails=tails, plan=plan, counters=counters)
        op(**call.arguments, skip_io=skip_io)
        self.expect(call, skip_io=skip_io)
        self.compare()

    def call(
        self,
        requests: list[int],
        top_k: list[list[int]],
        seq_lens: list[int],
        *,
        real: int | None = None,
        tails: list[int] | None = None,
        plan: bool = False,
        counters: bool = False,
    ) -> Call:
        """The arguments of an op's call on a batch."""
        batch, device = len(requests), self.device
        out = torch.full((batch, self.top_k + 3), POISON_LOC, dtype=torch.int32, device=device)
        tokens_in = torch.full((batch, self.top_k + 5), 1, dtype=torch.int32)  # columns after top_k are not to be read
        tokens_in[:, : self.top_k] = torch.tensor(top_k, dtype=torch.int32)
        tokens_in = tokens_in.to(device)
        options: dict[str, Any] = {}
        if real is not None:
            options["num_real_reqs"] = torch.tensor([real], dtype=torch.int32, device=device)
        if tails is not None:
            options["tail_start"] = torch.tensor(tails, dtype=self.length_dtype, device=device)
        if plan:
            options["miss_src"] = torch.full((batch, self.top_k), -7, dtype=torch.int64, device=device)
            options["miss_dst"] = torch.full((batch, self.top_k + 2), -7, dtype=torch.int32, device=device)
            options["miss_count"] = torch.full((batch,), -7, dtype=torch.int32, device=device)
        if counters:
            options["counters"] = torch.tensor(COUNTED, dtype=torch.int64, device=device)
        arguments = {
            "top_k_tokens": tokens_in,
            "device_buffer_tokens": self.tokens,
            "host_cache_locs": self.host_locs,
            "device_buffer_locs": self.locs,
            "host_cache": self.host,
            "device_buffer": self.cache,
            "top_k_device_locs": out,
            "req_pool_indices": torch.tensor(requests, dtype=self.index_dtype, device=device),
            "seq_lens": torch.tensor(seq_lens, dtype=self.length_dtype, device=device),
            "lru_slots": self.lru,
            "item_size_bytes": self.item,
            "num_top_k": self.top_k,
            "hot_buffer_size": self.hot,
        }
        return Call(requests, top_k, seq_lens, batch if real is None else real, tails, options, arguments | options)

    def expect(self, call: Call, *, skip_io: bool = False) -> None:
        """Let the oracle do the same, and compare what the call answered."""
        options, totals = call.options, list(COUNTED)
        out = call.arguments["top_k_device_locs"]
        for row, request in enumerate(call.requests):
            if row >= call.real:
                expected = oracle.Answer([-1] * self.top_k)
            else:
                tail = None if call.tails is None else call.tails[row]
                expected = oracle.swap_in(self.expected[request], call.top_k[row], call.seq_lens[row], self.hot, tail)
                if not skip_io:
                    oracle.copy(expected.copies, self.host_rows, self.expected_rows, self.item)
            wanted, got = expected.locs + [POISON_LOC] * 3, out[row].tolist()
            wrong = [(i, got[i], wanted[i]) for i in range(len(wanted)) if got[i] != wanted[i]]
            assert not wrong, f"locs of row {row}: {len(wrong)} wrong, (index, got, wanted): {wrong[:8]}"
            copies = len(expected.copies)
            if row < call.real:
                bucket = next(k for k in range(14) if copies < 2**k or k == 13)
                for at, more in enumerate((expected.hits, copies, copies * self.item, 1)):
                    totals[at] += more
                totals[4 + bucket] += 1
            if "miss_count" in options:
                assert options["miss_count"][row] == copies, f"miss_count of row {row}"
                src, dst = options["miss_src"][row].tolist(), options["miss_dst"][row].tolist()
                assert list(zip(src[:copies], dst[:copies], strict=True)) == expected.copies, f"plan of row {row}"
                assert set(src[copies:]) | set(dst[copies:]) <= {-7}, f"plan of row {row} past its count"
        if "counters" in options:
            assert options["counters"].tolist() == totals

    def compare(self) -> None:
        """All tables and all bytes of the device cache are what the oracle says."""
        for request, tables in enumerate(self.expected):
            assert self.lru[request].tolist() == tables.lru, f"lru of request {request}"
            assert self.tokens[request].tolist() == tables.tokens, f"tokens of request {request}"
        rows = self.cache.cpu().numpy()
        wrong = [row for row, data in enumerate(self.expected_rows) if bytes(rows[row]) != data]
        assert not wrong, f"device rows {wrong[:8]}"

    def choose(self, seq_len: int, *, fresh: float = 0.5, junk: float = 0.1) -> list[int]:
        """A top-k of random tokens, some negative, some repeated, some past the end."""
        distinct = self.rng.sample(range(seq_len), min(seq_len, self.top_k))
        nothing = (-1, -(2**31))
        chosen = [token if self.rng.random() >= junk else self.rng.choice(nothing) for token in distinct]
        chosen += [-1] * (self.top_k - len(chosen))
        for index in range(self.top_k):
            dice = self.rng.random()
            if dice < junk / 4:
                chosen[index] = seq_len + self.rng.randrange(5)
            elif dice < junk / 2:
                chosen[index] = self.rng.choice(distinct)
            elif dice > fresh and index < len(distinct):
                chosen[index] = distinct[index] % max(1, seq_len // 2)  # the older half: often still there
        self.rng.shuffle(chosen)
        return chosen


class Graph:
    """Calls of an op in one CUDA graph, replayed with the arguments of calls like them."""

    TABLES = (
        "device_buffer_tokens",
        "host_cache_locs",
        "device_buffer_locs",
        "host_cache",
        "device_buffer",
        "lru_slots",
    )

    def __init__(self, op: Callable[..., Any], calls: list[Call]) -> None:
        self.static = [self._own(call) for call in calls]
        nobody = torch.zeros(1, dtype=torch.int32, device="cuda")
        op(**calls[0].arguments | self.static[0] | {"num_real_reqs": nobody})  # compiles, and changes no table
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call, static in zip(calls, self.static, strict=True):
                op(**call.arguments | static)

    def _own(self, call: Call) -> dict[str, torch.Tensor]:
        tensors = {name: given for name, given in call.arguments.items() if isinstance(given, torch.Tensor)}
        return {name: tensor.clone() for name, tensor in tensors.items() if name not in self.TABLES}

    def replay(self, calls: list[Call]) -> None:
        """With the arguments of `calls`, whose outputs are written."""
        for call, static in zip(calls, self.static, strict=True):
            for name, tensor in static.items():
                tensor.copy_(call.arguments[name])
        self.graph.replay()
        for call, static in zip(calls, self.static, strict=True):
            for name, tensor in static.items():
                call.arguments[name].copy_(tensor)
