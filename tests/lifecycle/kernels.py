"""The allocators' three Triton kernels in plain torch: interpreted, they were two thirds of the state machine's time.

`install` puts them in only where they do, call by call, what the installed release's kernels do when interpreted.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable

import torch

CALLS = 8
"""Random calls in which both must agree, for each kernel and process."""


def _alloc_extend(before, after, last, free, out, *sizes: int) -> None:
    """For each request, the rest of its last page, then free pages in order."""
    at, taken, page = 0, 0, sizes[-1]
    for start, end, newest in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        pages = -(-end // page) - -(-start // page)
        rest = min(end, -(-start // page) * page) - start
        rows = free[taken : taken + pages, None] * page + torch.arange(page)  # fewer if the pool is empty
        slots = torch.cat([torch.arange(newest + 1, newest + 1 + rest), rows.flatten()])[: end - start]
        out[at : at + len(slots)] = slots
        at, taken = at + end - start, taken + pages


def _alloc_decode(lengths, last, free, out, _batch, page: int) -> None:
    """For each request, the slot after its newest, or the first of a free page."""
    new = (lengths - 1) % page == 0
    first = torch.zeros_like(out)
    pages = free[: int(new.sum())] * page  # fewer if the pool is empty
    first[new.nonzero().flatten()[: len(pages)]] = pages
    out.copy_(torch.where(new, first, last + 1))


def _write_table(table, slots, *more) -> None:
    """For each request, its row of slots: the prefix at an address, then what was allocated."""
    *per_request, out, _stride = more
    at = 0
    rows = (t.tolist() for t in (slots, *per_request))
    for slot, address, start, end, count in zip(*rows, strict=True):
        if start:
            table[slot, :start] = torch.frombuffer((ctypes.c_int64 * start).from_address(address), dtype=torch.int64)
        table[slot, start:end] = out[at : at + end - start]
        at += count


class Plain:
    """Called as a Triton kernel is: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, _grid) -> Callable[..., None]:
        return self.function


def install() -> None:
    """Replace the kernels wherever a module of SGLang's names them.

    Raises:
        AssertionError: a kernel of this release does something else.
    """
    for name, (plain, call) in KERNELS.items():
        modules = [m for key, m in sys.modules.items() if key.startswith("sglang.") and name in vars(m)]
        (kernel,) = {id(vars(m)[name]): vars(m)[name] for m in modules}.values()
        for seed in range(CALLS):
            grid, arguments, written = call(random.Random(seed))
            plain(*arguments)
            mine = written.clone()
            written.fill_(-1)
            kernel[grid](*arguments)
            assert mine.equal(written), f"{name}: {written} and not {mine} after {arguments}"
        for module in modules:
            setattr(module, name, Plain(plain))


def _batch(chance: random.Random, page: int):
    before = torch.tensor(
        [chance.choice([0, 0, page, chance.randrange(3 * page)]) for _ in range(chance.randint(1, 4))]
    )
    after = before + torch.tensor([chance.choice([1, page, chance.randint(1, 3 * page)]) for _ in before])
    last = torch.tensor([chance.randrange(50) * page + (int(n) - 1) % page for n in before])
    free = torch.tensor(chance.sample(range(1, 60), 40))
    return before, after, last, free


def _extend_call(chance: random.Random, page: int = 16):
    before, after, last, free = _batch(chance, page)
    out = torch.full((int((after - before).sum()),), -1)
    return (len(before),), (before, after, last, free, out, 4, page), out


def _decode_call(chance: random.Random, page: int = 16):
    before, _, last, free = _batch(chance, page)
    out = torch.full((len(before),), -1)
    return (len(before),), (before + 1, last, free, out, 4, page), out


def _table_call(chance: random.Random, page: int = 16):
    before, after, _, _ = _batch(chance, page)
    table = torch.full((5, 8 * page), -1, dtype=torch.int32)
    slots = torch.tensor(chance.sample(range(5), len(before)))
    prefixes = torch.tensor([_ANYWHERE.data_ptr() + 8 * chance.randrange(900) for _ in before], dtype=torch.uint64)
    out = torch.tensor([chance.randrange(900) for _ in range(int((after - before).sum()))])
    return (len(before),), (table, slots, prefixes, before, after, after - before, out, table.shape[1]), table


_ANYWHERE = torch.arange(1000)
"""Where prefixes of the calls below lie."""

KERNELS = {
    "alloc_extend_kernel": (_alloc_extend, _extend_call),
    "alloc_decode_kernel": (_alloc_decode, _decode_call),
    "write_req_to_token_pool_triton": (_write_table, _table_call),
}
