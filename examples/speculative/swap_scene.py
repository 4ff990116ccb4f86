"""One cell of `swap.py`: requests under verification, what their queries select, and three ways to swap it in.

Every row of host memory holds what its number says, so the right answer to every entry is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_hisparse_plugin.kernels.swap_in import swap_in
from sglang_hisparse_plugin.speculative.rows import VerifyRows

PAGE = 64
WARM_MISSES = 512  # of one request in one verification, while a buffer is filled
SCRATCH = 1024  # SGLang's rows beside a buffer that has room for all queries


class Cell(NamedTuple):
    """One point of the grid. All numbers are of one request."""

    batch: int
    drafts: int
    misses: int
    """Rows that a verification has to copy: half are selected by every query, the others by one."""
    row_bytes: int
    top_k: int = 2048
    context: int = 32768
    """Committed tokens."""

    @property
    def hot(self) -> int:
        return self.drafts * self.top_k

    @property
    def bytes(self) -> int:
        return self.batch * self.misses * self.row_bytes


def content(rows: Tensor, words: int) -> Tensor:
    """What host rows of these numbers hold: [..., words] int64."""
    return rows.unsqueeze(-1) * 1_000_003 + torch.arange(words, device=rows.device)


def host_memory(rows: int, row_bytes: int, pinned: bool) -> Tensor:
    """[rows, row_bytes / 8] int64, each row with its content."""
    host = torch.empty((rows, row_bytes // 8), dtype=torch.int64, pin_memory=pinned)
    for part in torch.arange(rows).split(1 << 15):
        host[part] = content(part, host.size(1))
    return host


class Load:
    """Host memory of a cell, and the selections of its verifications.

    Attributes:
        host: [batch * context, row_bytes / 8] int64, of `host_memory`.
        host_locs: [batch, context + drafts] int64, host row of each token; those of draft tokens are not read.
        warm: selections that fill a buffer; timed: those that are measured. [batch, drafts, top_k] int32 each.
    """

    def __init__(self, cell: Cell, steps: int, host: Tensor, device: torch.device, seed: int = 0) -> None:
        self.cell, self.device = cell, device
        self.generator = torch.Generator(device).manual_seed(seed)
        rows = cell.batch * cell.context
        self.host = host[:rows]
        self.host_locs = torch.full((cell.batch, cell.context + cell.drafts), -1, device=device)
        self.host_locs[:, : cell.context] = self._shuffled(cell.batch, rows // cell.batch, rows)
        # what is selected, but drafts: none of the tokens that a buffer holds at first
        late = torch.rand(cell.batch, cell.context - cell.hot, device=device, generator=self.generator)
        self.order = late.argsort(1) + cell.hot
        self.used = cell.top_k
        warm = min(WARM_MISSES, cell.top_k // 2)
        self.warm = [*(self._select(warm) for _ in range(-(-cell.hot // warm) + 1)), self._select(0)]
        self.timed = [self._select(cell.misses) for _ in range(steps)]

    def _shuffled(self, rows: int, columns: int, count: int) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator).view(rows, columns)

    def _select(self, misses: int) -> Tensor:
        """What the queries of one verification select: the tokens of all verifications, drafts, and new ones."""
        cell = self.cell
        own = misses // (2 * cell.drafts)
        shared = misses - own * cell.drafts
        if self.used + misses > self.order.size(1):
            raise ValueError(f"a context of {cell.context} tokens is too short for so many misses")
        fresh = self.order[:, self.used : self.used + misses]
        self.used += misses
        queries = []
        for i in range(cell.drafts):
            drafts = torch.arange(cell.context, cell.context + i + 1, device=self.device).expand(cell.batch, -1)
            mine = fresh[:, shared + i * own : shared + (i + 1) * own]
            rest = cell.top_k - (i + 1) - shared - own
            chosen = torch.cat([drafts, fresh[:, :shared], mine, self.order[:, :rest]], dim=1)
            mixed = torch.rand(chosen.shape, device=self.device, generator=self.generator).argsort(1)
            queries.append(chosen.gather(1, mixed))
        return torch.stack(queries, dim=1).int().contiguous()


class Way:
    """A way to swap in what the queries of a verification select: its tables and the device rows.

    `spare`: device rows of a request beside its buffer and extra page.
    """

    spare = 0

    def __init__(self, load: Load) -> None:
        self.load, self.cell = load, load.cell
        cell, device = load.cell, load.device
        self.width = cell.hot + PAGE
        owned = load._shuffled(cell.batch, self.width + self.spare, cell.batch * (self.width + self.spare)).int()
        self.locs, self.extra = (part.clone(memory_format=torch.contiguous_format) for part in self._parts(owned))
        self.cache = torch.full((owned.numel(), load.host.size(1)), -1, dtype=torch.int64, device=device)
        self.tokens = torch.full((cell.batch, self.width), -1, dtype=torch.int32, device=device)
        self.tokens[:, : cell.hot] = torch.arange(cell.hot, device=device)
        self.requests = torch.arange(cell.batch, device=device)
        self.real = torch.tensor([cell.batch], dtype=torch.int32, device=device)
        self.cache[self.locs[:, : cell.hot].long()] = content(load.host_locs[:, : cell.hot], load.host.size(1))
        columns = cell.hot + 1 + torch.arange(cell.drafts, device=device)
        self.cache[self.locs[:, columns].long()] = self._drafts()
        self.state: list[Tensor] = [self.tokens, self.locs, self.extra]
        self.prepare()
        for selected in load.warm:
            self.call(selected)
        self._kept = [table.clone() for table in self.state]

    def _parts(self, owned: Tensor) -> tuple[Tensor, Tensor]:
        return owned[:, : self.width], owned[:, self.width :]

    def prepare(self) -> None:
        """Tables of one's own, for a request that has just started to decode."""
        raise NotImplementedError

    def call(self, selected: Tensor) -> Tensor:
        """Device rows of what the queries select, [batch, drafts, top_k] int32 as `selected`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Put the tables back to where the buffers had been filled."""
        for table, kept in zip(self.state, self._kept, strict=True):
            table.copy_(kept)

    def check(self) -> None:
        """Every answer of every verification, and the number of rows each had to copy.

        Raises:
            RuntimeError: one is wrong.
        """
        self.reset()
        for step, selected in enumerate(self.load.timed):
            before = self.tokens[:, : self.cell.hot].clone()
            locs = self.call(selected).long()
            right = self._rows(selected)
            wrong = ((locs < 0) | (self.cache[locs.clamp(min=0)] != right).any(-1)).sum()
            misses = (self.tokens[:, : self.cell.hot] != before).sum(1)
            where = f"{type(self).__name__}, {self.cell}, verification {step}"
            if int(wrong):
                raise RuntimeError(f"{where}: {int(wrong)} of {wrong.numel() * selected.numel()} rows are wrong")
            if not bool((misses == self.cell.misses).all()):
                raise RuntimeError(f"{where}: {misses.tolist()} rows were copied, not {self.cell.misses}")

    def _rows(self, selected: Tensor) -> Tensor:
        cell = self.cell
        tokens = selected.long()
        hosted = self.load.host_locs.gather(1, tokens.flatten(1).clamp(max=cell.context - 1)).view_as(tokens)
        words = self.load.host.size(1)
        drafts = self._drafts()[self.requests.view(-1, 1, 1), (tokens - cell.context).clamp(min=0)]
        return torch.where((tokens < cell.context).unsqueeze(-1), content(hosted, words), drafts)

    def _drafts(self) -> Tensor:
        cell = self.cell
        numbers = -2 - torch.arange(cell.batch * cell.drafts, device=self.load.device).view(cell.batch, cell.drafts)
        return content(numbers, self.load.host.size(1))


class Calls(Way):
    """The plugin's: one call of its op for each query (`VerifyRows.swap_in`, what runs in a server)."""

    def prepare(self) -> None:
        cell, one = self.cell, lambda table: table.unsqueeze(0)
        self.lru = torch.arange(cell.hot, dtype=torch.int16, device=self.load.device).repeat(cell.batch, 1)
        self.state.append(self.lru)
        self.lengths = torch.full((cell.batch,), cell.context, device=self.load.device)
        pool = _Namespace(kv_buffer=[self.cache], page_size=PAGE)
        host = _Namespace(kv_buffer=[self.load.host], token_stride_size=cell.row_bytes)
        coordinator = _Namespace(
            req_to_host_pool=self.load.host_locs,
            req_to_device_buffer=self.locs,
            req_device_buffer_tokens=one(self.tokens),
            req_device_buffer_token_locs=one(self.locs),
            lru_slots=one(self.lru),
            mem_pool_device=pool,
            mem_pool_host=host,
            top_k=cell.top_k,
            device_buffer_size=cell.hot,
            num_real_reqs=self.real,
        )
        self.rows = VerifyRows(coordinator, cell.drafts)
        self.rows.lengths[:] = self.lengths + 1 + torch.arange(cell.drafts, device=self.load.device).unsqueeze(1)
        self.batch = _Namespace(req_pool_indices=self.requests, seq_lens=self.lengths)

    def call(self, selected: Tensor) -> Tensor:
        return self.rows.swap_in(0, self.batch, selected.flatten(0, 1)).view_as(selected)


class Union(Calls):
    """The plugin's op, once for all queries of a request: their top-k one after the other is one top-k."""

    def prepare(self) -> None:
        super().prepare()
        self.out = torch.empty((self.cell.batch, self.cell.hot), dtype=torch.int32, device=self.load.device)

    def call(self, selected: Tensor) -> Tensor:
        swap_in(
            top_k_tokens=selected.flatten(1),
            device_buffer_tokens=self.tokens,
            host_cache_locs=self.load.host_locs,
            device_buffer_locs=self.locs,
            host_cache=self.load.host,
            device_buffer=self.cache,
            top_k_device_locs=self.out,
            req_pool_indices=self.requests,
            seq_lens=self.rows.lengths[-1],
            lru_slots=self.lru,
            item_size_bytes=self.cell.row_bytes,
            num_top_k=self.cell.hot,
            hot_buffer_size=self.cell.hot,
            num_real_reqs=self.real,
            tail_start=self.lengths,
        )
        return self.out.view_as(selected)


class Upstream(Way):
    """SGLang's own kernel for a verification, with the state its coordinator keeps for it.

    `kernel`: the compiled function (`swap_jit.upstream_spec`).
    """

    spare = SCRATCH
    kernel: Callable[..., Any]

    def prepare(self) -> None:
        cell, device = self.cell, self.load.device
        buckets = 1 << (2 * cell.hot - 1).bit_length()
        self.index = torch.full((cell.batch, 2, buckets), -1, device=device)
        tokens = torch.arange(cell.hot, device=device)
        self.index[:, 0, (tokens * 2654435761) & (buckets - 1)] = (tokens << 32) | tokens
        self.policy = torch.zeros((cell.batch + 1, cell.hot), dtype=torch.int32, device=device)
        width = max(4 * cell.batch, 5 * cell.hot)
        self.scratch = torch.full((cell.batch + 1, width), -1, dtype=torch.int32, device=device)
        self.scratch[0] = 0
        self.state += [self.index, self.policy, self.scratch]
        self.tokens[:, cell.hot + 1 : cell.hot + 1 + cell.drafts] = cell.context + torch.arange(cell.drafts)
        seen = cell.context + 1 + torch.arange(cell.drafts, device=device)
        self.lengths = seen.int().repeat(cell.batch)
        self.out = torch.empty((cell.batch, cell.drafts, cell.top_k), dtype=torch.int32, device=device)
        self.none = torch.empty(0)

    def call(self, selected: Tensor) -> Tensor:
        tables = (self.tokens, self.load.host_locs, self.locs, self.load.host, self.cache, self.out, self.requests)
        state = (self.lengths, self.index, self.policy, self.extra, self.scratch, self.real)
        self.kernel(selected, *tables, *state, PAGE, self.none, self.none, self.none)
        return self.out


class _Namespace:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)
