"""The three pools of a scheduler with HiSparse, audited: every slot in one hand, every row what was written.

A KV row is a known function of the token it belongs to; free rows are overwritten with a pattern that no token has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from sglang.srt.managers.schedule_batch import Req

from .server import PAGE

POISON = -1
UNITS = {"logical": "pages", "device": "pages", "host": "rows"}


class Pools:
    """Logical, device (hot-buffer) and host slots, and the request slots that everything is kept under."""

    def __init__(self, scheduler) -> None:
        allocator = scheduler.token_to_kv_pool_allocator
        self.scheduler, self.coordinator = scheduler, scheduler.hisparse_coordinator
        self.logical, self.device = allocator.logical_attn_allocator, allocator.hisparse_attn_allocator
        self.host, self.slots = self.coordinator.mem_pool_host, scheduler.req_to_token_pool
        self.mapping = self.coordinator.mem_pool_device.full_to_hisparse_device_index_mapping
        self.layers = range(self.coordinator.mem_pool_device.layer_num)
        self.counted = next(p for p in (self.device, self.logical) if p.size == scheduler.max_total_num_tokens)
        """The pool whose size is SGLang's `max_total_num_tokens`."""
        self.held: dict[str, list[int]] = {pool: [] for pool in UNITS}
        self.held_slots: list[int] = []
        self.audits = 0
        self.at_rest = self.sizes()
        self.limiting = self.device if scheduler.max_req_len < self.device.size else self.logical
        """The pool that limits a request: SGLang's own choice, or that of overlay length-limit."""
        self.built = list(self.slots.free_slots), scheduler.max_req_len
        self.longest_prompt = self.device if scheduler.max_req_input_len <= self.device.size else self.limiting
        """The pool that holds a whole prompt: where KV is received, with overlay length-limit, not the device pool."""

    def sizes(self) -> dict[str, int]:
        """How much of each is free."""
        pools = {"logical": self.logical, "device": self.device, "host": self.host, "slots": self.slots}
        sizes = {name: pool.available_size() for name, pool in pools.items()}
        metadata = getattr(self.scheduler, "req_to_metadata_buffer_idx_allocator", None)
        return sizes | ({"metadata": metadata.available_size()} if metadata else {})

    def resize(self, logical: int, device: int, host: int, slots: int) -> None:
        """Give empty pools the sizes with which a server could have started: pages, pages, rows and request slots."""
        scheduler, allocator = self.scheduler, self.scheduler.token_to_kv_pool_allocator
        free_slots, longest = self.built
        for pool, pages in ((self.logical, logical), (self.device, device)):
            pool.size, pool.num_pages = pages * PAGE, pages
        allocator._size_full, allocator._size_hisparse, self.host.size = self.logical.size, self.device.size, host
        allocator.clear()
        self.host.clear()
        ahead = 2 * slots if getattr(self.slots, "pre_alloc_size", 0) else 0  # of requests whose KV is on its way
        self.slots.size, self.slots.pre_alloc_size, self.slots.free_slots = slots, ahead, free_slots[: slots + ahead]
        self.slots._alloc_size = slots + ahead + 1
        scheduler.max_running_requests = slots
        for part in (scheduler, *vars(scheduler).values()):
            if hasattr(part, "max_total_num_tokens"):
                object.__setattr__(part, "max_total_num_tokens", self.counted.size)
        scheduler.max_req_len = min(longest, self.limiting.size - 1)
        scheduler.max_req_input_len = min(scheduler.max_req_len - 5, self.longest_prompt.size)
        self.at_rest = self.sizes()

    def hold_memory(self, pool: str, keep: int) -> None:
        """Take free memory of `pool` away until `keep` pages are left."""
        allocator = getattr(self, pool)
        if (take := allocator.available_size() // PAGE - keep) > 0:
            slots = allocator.alloc(take * PAGE)
            self.held[pool] += (slots if pool == "host" else slots[::PAGE] // PAGE).tolist()
        self._tell_idle_check()

    def release_memory(self) -> None:
        for pool, units in self.held.items():
            if units:
                slots = torch.tensor(units)
                paged = (slots[:, None] * PAGE + torch.arange(PAGE)).flatten()
                getattr(self, pool).free(slots if pool == "host" else paged)
                units.clear()
        self._tell_idle_check()

    def hold_slots(self, keep: int) -> None:
        """Leave only `keep` request slots."""
        self.held_slots = [self.slots.free_slots.pop() for _ in range(len(self.slots.free_slots) - keep)]

    def release_slots(self) -> None:
        self.slots.free_slots += self.held_slots
        self.held_slots = []

    def device_rows(self) -> list[torch.Tensor]:
        """Per layer, (device slots + page, words of a row) int64."""
        pool = self.coordinator.mem_pool_device
        return [pool.kv_buffer[layer].flatten(1).view(torch.int64) for layer in self.layers]

    def host_rows(self) -> list[torch.Tensor]:
        """Per layer, (host slots, words of a row) int64."""
        return [self.host.kv_buffer[layer].flatten(1).view(torch.int64) for layer in self.layers]

    def host_rows_of(self, req: Req) -> list[int]:
        """The host rows in a request's hand."""
        slot = slot_of(req)
        rows = self.coordinator.req_to_host_pool[slot] if slot is not None else self.coordinator.req_to_host_pool[0, :0]
        return rows[rows >= 0].tolist()

    def audit(self, requests: Mapping[str, Req]) -> Iterator[str]:
        """What is wrong with the pools, given every request there ever was. Poisons what is free."""
        self.audits += 1
        holders = {rid: slot for rid, req in requests.items() if (slot := slot_of(req)) is not None}
        owned = {pool: [torch.tensor(self.held[pool], dtype=torch.int64)] for pool in UNITS}
        for rid, slot in holders.items():
            for pool, units in self._owned_by(requests[rid], slot).items():
                owned[pool].append(units)
        free = {"logical": _pages(self.logical), "device": _pages(self.device), "host": _host_slots(self.host)}
        last = {"logical": self.logical.size // PAGE, "device": self.device.size // PAGE, "host": self.host.size - 1}
        for pool, name in UNITS.items():
            units = torch.cat([free[pool], *owned[pool]])
            first = 0 if pool == "host" else 1
            known = (units >= first) & (units <= last[pool])
            if not bool(known.all()):
                yield f"{pool} {name} that there are not: {some(units[~known].tolist())}"
            hands = torch.bincount(units[known], minlength=last[pool] + 1)[first:]
            for what, wrong in (("two hands", hands > 1), ("no hand", hands == 0)):
                if bool(wrong.any()):
                    yield f"{pool} {name} in {what}: {some((wrong.nonzero().flatten() + first).tolist())}"
        slots = Counter([*holders.values(), *self.slots.free_slots, *self.held_slots])
        if len(slots) != self.at_rest["slots"] or set(slots.values()) != {1}:
            yield f"request slots in hands: {dict(slots)}"
        yield from self._remembered(self.slots.free_slots)
        self._poison(free)

    def check_host(self, req: Req, upto: int) -> Iterator[str]:
        """What is wrong with the host copies of a request's first `upto` tokens."""
        where = self.coordinator.req_to_host_pool[slot_of(req), :upto].long()
        if missing := (where < 0).nonzero().flatten().tolist():
            yield f"tokens {some(missing)} have no host row"
            return
        tokens = torch.arange(upto) + req.origin_input_ids[0]
        for layer, rows in enumerate(self.host_rows()):
            if wrong := differ(rows[where], content(tokens, layer)).nonzero().flatten().tolist():
                yield f"host rows of tokens {some(wrong)} are wrong"

    def check_staged(self, req: Req) -> Iterator[str]:
        """What is wrong with the rows that a prompt in staging has on the host."""
        written = len(req.origin_input_ids) + len(req.output_ids) - 1
        yield from self.check_host(req, written)

    def _owned_by(self, req: Req, slot: int) -> dict[str, torch.Tensor]:
        """Logical and device pages and host rows; device pages by the mapping until there is a hot buffer."""
        coordinator = self.coordinator
        logical = self.slots.req_to_token[slot, : allocated(req)].long()
        capacity = int(coordinator.req_device_buffer_size[slot])
        device = coordinator.req_to_device_buffer[slot, :capacity] if capacity else self.mapping[logical]
        swap = getattr(coordinator, "spec_swap", None)
        workspace = swap.req_to_scratch[0, slot] if swap and slot in swap._scratch_reqs else device[:0]
        host = coordinator.req_to_host_pool[slot]
        return {
            "logical": (logical // PAGE).unique(),
            "device": torch.cat([(device[device > 0] // PAGE).unique(), (workspace // PAGE).unique()]).long(),
            "host": host[host >= 0].long(),
        }

    def _remembered(self, free: list[int]) -> Iterator[str]:
        c = self.coordinator
        traces = {
            "hot buffer size": c.req_device_buffer_size[free] != 0,
            "hot buffer": c.req_to_device_buffer[free] != 0,
            "list of cached tokens": c.req_device_buffer_tokens[:, free] != -1,
            "list of cached slots": c.req_device_buffer_token_locs[:, free] != -1,
            "row of host slots": c.req_to_host_pool[free] != -1,
            "LRU order": c.lru_slots[:, free] != c._lru_init,
            "backup to skip": any(c._skip_first_backup[slot] for slot in free),
        }
        for what, trace in traces.items():
            if trace if isinstance(trace, bool) else bool(trace.any()):
                yield f"a free request slot still has a {what}"

    def _poison(self, free: Mapping[str, torch.Tensor]) -> None:
        device = (free["device"][:, None] * PAGE + torch.arange(PAGE)).flatten()
        for where, buffers in ((device, self.device_rows()), (free["host"], self.host_rows())):
            for rows in buffers:
                rows[where[rows[where, 0] != POISON]] = POISON

    def _tell_idle_check(self) -> None:
        """An idle scheduler of 0.5.10 and 0.5.11 stops the server if it does not find this much free."""
        left = (self.at_rest[pool] - len(self.held[pool]) * PAGE for pool in ("logical", "device"))
        self.scheduler.max_total_num_tokens = min(left)


_PRIME, _SHORTS = 32749, 576
_ROWS = (torch.arange(_PRIME + 3 * _SHORTS) % _PRIME).to(torch.int16).as_strided((_PRIME, _SHORTS), (1, 3))
_ROWS = _ROWS.contiguous().view(torch.int64)
"""Row v holds the 16-bit numbers v, v + 3, v + 6, ...; a table, for looking up costs less than computing."""


def content(tokens: torch.Tensor, layer: int) -> torch.Tensor:
    """(n, words of a row) int64: what the KV row of each token holds in `layer`."""
    return _ROWS[(tokens * 31 + layer * 7) % _PRIME]


def differ(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(n,) bool: which rows are not as wanted."""
    return torch.zeros(len(rows), dtype=torch.bool) if rows.equal(wanted) else (rows != wanted).any(1)


def slot_of(req: Req) -> int | None:
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def allocated(req: Req) -> int:
    return (req if hasattr(req, "kv_allocated_len") else req.kv).kv_allocated_len


def some(items: list[int]) -> str:
    return f"{sorted(items)[:6]}{' and more' if len(items) > 6 else ''}"


def _pages(allocator) -> torch.Tensor:
    staged = getattr(allocator, "staged_pages", None) or [p for p in [allocator.release_pages] if p is not None]
    return torch.cat([allocator.free_pages, *staged]).long()


def _host_slots(pool) -> torch.Tensor:
    return torch.cat([pool.free_slots, *getattr(pool, "release_slots", [])]).long()
