"""What a decode step takes is what is asked of each pool; for more requests no tensor is read more often."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hisparse_plugin import memory

PAGE, HOT = 64, 128
WHOLE = HOT + PAGE  # of a buffer, with the page for the newest token


class Table:
    """Numbers by request slot, on the host; counts how often somebody looks."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values, self.reads = torch.tensor(values), 0

    def __getitem__(self, slots: Any) -> torch.Tensor:
        self.reads += 1
        found: torch.Tensor = self.values[slots]
        return found


def coordinator(buffers: Sequence[int], reserved: Sequence[int] | None, skips: Sequence[bool]) -> SimpleNamespace:
    pages = SimpleNamespace(page_size=PAGE)
    tables = {"req_device_buffer_size": Table(buffers)}
    if reserved is not None:  # from 0.5.13
        tables["req_to_host_pool_allocated_len"] = Table(reserved)
    return SimpleNamespace(
        **tables,
        device_buffer_size=HOT,
        padded_buffer_size=WHOLE,
        mem_pool_device=pages,
        mem_pool_host=pages,
        _skip_first_backup=list(skips),
    )


def paged(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """Tokens of each, slots of its buffer, positions with a host slot, and whether its first step is to come."""
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        tokens = draw(st.integers(1, 400))
        size = min(paged(tokens), HOT) if tokens < HOT else WHOLE
        rows.append((tokens, size, draw(st.sampled_from([paged(tokens - 1), paged(tokens)])), draw(st.booleans())))
    return rows


@pytest.mark.parametrize("in_pages", [False, True], ids=["to 0.5.12", "from 0.5.13"])
@settings(max_examples=200, deadline=None)
@given(rows=requests())
def test_each_pool_is_asked_for_what_every_request_takes(
    in_pages: bool, rows: list[tuple[int, int, int, bool]]
) -> None:
    tokens, buffers, reserved, skips = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
    c = coordinator(buffers, reserved if in_pages else None, skips)
    reqs = [SimpleNamespace(req_pool_idx=i, kv_allocated_len=n) for i, n in enumerate(tokens)]
    device = host = 0
    for n, size, held, first in rows:
        device += (WHOLE if paged(n + 1) >= HOT else paged(n + 1)) - size if size < WHOLE else 0
        host += 0 if first else max(0, paged(n) - held) if in_pages else 1
    assert memory.step(c, reqs) == {"device": device, "host": host}


@pytest.mark.parametrize("count", [1, 64])
def test_a_table_is_read_once_for_all(count: int) -> None:
    c = coordinator([WHOLE] * count, [512] * count, [False] * count)
    memory.step(c, [SimpleNamespace(req_pool_idx=i, kv_allocated_len=400) for i in range(count)])
    assert (c.req_device_buffer_size.reads, c.req_to_host_pool_allocated_len.reads) == (1, 1)
