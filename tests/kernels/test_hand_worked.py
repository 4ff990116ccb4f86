"""Cases worked out by hand, from the rules in the docs: nothing here calls the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

HOT, TOP_K, PAGE = 6, 4, 3
# Slot s lies in device row 20 - s, token t in host row 40 + t; rows are three bytes, the number of the row thrice.
LOCS = [20 - s for s in range(HOT + PAGE)]


@dataclass(frozen=True)
class Case:
    name: str
    seq_len: int
    top_k: list[int]
    tokens: list[int]  # before
    lru: list[int]  # before
    locs: list[int]  # expected
    tokens_after: list[int]
    lru_after: list[int]
    copies: dict[int, int]  # device row: host row
    tail: int | None = None


CASES = [
    Case(
        "all hit: their slots go to the end, in the order they had",
        12, [8, 0, 3, 5], tokens=[5, 3, 8, 0, 7, 1], lru=[4, 2, 0, 5, 1, 3],
        locs=[18, 17, 19, 20], tokens_after=[5, 3, 8, 0, 7, 1], lru_after=[4, 5, 2, 0, 1, 3], copies={},
    ),
    Case(
        "misses take the first slots no hit keeps, and stand before the hits afterwards",
        12, [9, 3, 10, 7], tokens=[5, 3, 8, 0, 7, 1], lru=[4, 2, 0, 5, 1, 3],
        # slot 4 (7) and 1 (3) are hits; the others in order: 2, 0, 5, 3. Token 9 takes 2, token 10 takes 0.
        locs=[18, 19, 20, 16], tokens_after=[10, 3, 9, 0, 7, 1], lru_after=[5, 3, 2, 0, 4, 1],
        copies={18: 49, 20: 50},
    ),
    Case(
        "the newest token lies in the slot after the buffer and is not looked up, though a slot claims it",
        12, [11, 2, -1, 11], tokens=[11, 3, 8, 0, 7, 1], lru=[4, 2, 0, 5, 1, 3],
        locs=[14, 16, -1, 14], tokens_after=[11, 3, 8, 0, 2, 1], lru_after=[2, 0, 5, 1, 3, 4], copies={16: 42},
    ),
    Case(
        "a repeated miss takes one slot, that of its first place",
        12, [9, 2, 9, 2], tokens=[5, 3, 8, 0, 7, 1], lru=[0, 1, 2, 3, 4, 5],
        locs=[20, 19, 20, 19], tokens_after=[9, 2, 8, 0, 7, 1], lru_after=[2, 3, 4, 5, 0, 1], copies={20: 49, 19: 42},
    ),
    Case(
        "a repeated hit is one hit; -1 and tokens past the end select nothing",
        12, [8, -1, 12, 8], tokens=[5, 3, 8, 0, 7, 1], lru=[0, 1, 2, 3, 4, 5],
        locs=[18, -1, -1, 18], tokens_after=[5, 3, 8, 0, 7, 1], lru_after=[0, 1, 3, 4, 5, 2], copies={},
    ),
    Case(
        "nothing selected: nothing changes",
        12, [-1, -1, -1, -1], tokens=[5, 3, 8, 0, 7, 1], lru=[3, 1, 2, 0, 4, 5],
        locs=[-1, -1, -1, -1], tokens_after=[5, 3, 8, 0, 7, 1], lru_after=[3, 1, 2, 0, 4, 5], copies={},
    ),
    Case(
        "an empty buffer",
        12, [4, 3, 2, 1], tokens=[-1] * 6, lru=[5, 4, 3, 2, 1, 0],
        locs=[15, 16, 17, 18], tokens_after=[-1, -1, 1, 2, 3, 4], lru_after=[1, 0, 5, 4, 3, 2],
        copies={15: 44, 16: 43, 17: 42, 18: 41},
    ),
    Case(
        "a short sequence lies in the slots in order: no table is read or written, gaps in the top-k are kept",
        6, [-1, 5, 0, 6], tokens=[9, 9, 9, 9, 9, 9], lru=[5, 4, 3, 2, 1, 0],
        locs=[-1, 15, 20, -1], tokens_after=[9] * 6, lru_after=[5, 4, 3, 2, 1, 0], copies={},
    ),
    Case(
        "one token",
        1, [0, 0, 1, -1], tokens=[9, 9, 9, 9, 9, 9], lru=[5, 4, 3, 2, 1, 0],
        locs=[20, 20, -1, -1], tokens_after=[9] * 6, lru_after=[5, 4, 3, 2, 1, 0], copies={},
    ),
    Case(
        "one more than the buffer holds: the newest has moved to the extra page",
        7, [6, 5, 0, 3], tokens=[0, 1, 2, 3, 4, 5], lru=[0, 1, 2, 3, 4, 5],
        locs=[14, 15, 20, 17], tokens_after=[0, 1, 2, 3, 4, 5], lru_after=[1, 2, 4, 0, 3, 5], copies={},
    ),
    Case(
        "resident tail: tokens 10 and 11 lie in the extra page after the newest slot; 9 is an ordinary token",
        12, [11, 10, 9, 8], tokens=[11, 3, 8, 0, 7, 1], lru=[0, 1, 2, 3, 4, 5], tail=10,
        locs=[12, 13, 20, 18], tokens_after=[9, 3, 8, 0, 7, 1], lru_after=[1, 3, 4, 5, 0, 2], copies={20: 49},
    ),
    Case(
        "resident tail longer than the extra page: what lies nowhere is -1",
        12, [11, 9, 10, 0], tokens=[5, 3, 8, 0, 7, 1], lru=[0, 1, 2, 3, 4, 5], tail=9,
        locs=[-1, 13, 12, 17], tokens_after=[5, 3, 8, 0, 7, 1], lru_after=[0, 1, 2, 4, 5, 3], copies={},
    ),
    Case(
        "resident tail that begins after the newest token changes nothing",
        12, [11, 0, -1, -1], tokens=[5, 3, 8, 0, 7, 1], lru=[0, 1, 2, 3, 4, 5], tail=12,
        locs=[14, 17, -1, -1], tokens_after=[5, 3, 8, 0, 7, 1], lru_after=[0, 1, 2, 4, 5, 3], copies={},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hand_worked(case: Case, op, device) -> None:
    def table(row: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[0] * len(row), row], dtype=dtype, device=device)  # the request is slot 1 of two

    host = torch.arange(60, dtype=torch.uint8).repeat_interleave(3).view(60, 3)
    host = host.pin_memory() if device == "cuda" else host
    cache = torch.full((24, 3), 255, dtype=torch.uint8, device=device)
    tokens, lru = table(case.tokens, torch.int32), table(case.lru, torch.int16)
    out = torch.full((2, TOP_K), 77, dtype=torch.int32, device=device)
    op(
        top_k_tokens=torch.tensor([case.top_k, [3, 3, 3, 3]], dtype=torch.int32, device=device),
        device_buffer_tokens=tokens,
        host_cache_locs=table([40 + t for t in range(12)], torch.int64),
        device_buffer_locs=table(LOCS, torch.int32),
        host_cache=host,
        device_buffer=cache,
        top_k_device_locs=out,
        req_pool_indices=torch.tensor([1, 0], device=device),
        seq_lens=torch.tensor([case.seq_len, 9], device=device),
        lru_slots=lru,
        item_size_bytes=3,
        num_top_k=TOP_K,
        hot_buffer_size=HOT,
        num_real_reqs=torch.tensor([1], dtype=torch.int32, device=device),  # the second row is padding
        tail_start=None if case.tail is None else torch.tensor([case.tail, 0], device=device),
    )
    assert out.tolist() == [case.locs, [-1] * TOP_K]
    assert tokens.tolist() == [[0] * HOT, case.tokens_after]
    assert lru.tolist() == [[0] * HOT, case.lru_after]
    rows = [[255] * 3 for _ in range(24)]
    for device_row, host_row in case.copies.items():
        rows[device_row] = [host_row] * 3
    assert cache.tolist() == rows
