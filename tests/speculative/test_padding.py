"""Under DP attention SGLang pads a verification to that of the rank with most requests, with rows of request slot 0."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from sglang_hisparse_plugin.kernels import reference
from sglang_hisparse_plugin.speculative.rows import VerifyRows

SLOTS, STEPS, TOP_K, HOT, LENGTH = 4, 2, 4, 8, 40


def coordinator() -> SimpleNamespace:
    pool = SimpleNamespace(
        page_size=8, full_to_hisparse_device_index_mapping=torch.zeros(SLOTS * LENGTH, dtype=torch.int64)
    )
    return SimpleNamespace(
        device_buffer_size=HOT,
        top_k=TOP_K,
        mem_pool_device=pool,
        req_to_host_pool=torch.arange(SLOTS * LENGTH).view(SLOTS, LENGTH),
        req_to_device_buffer=torch.arange(SLOTS * (HOT + STEPS + 1)).view(SLOTS, -1),
    )


def batch(*slots: int) -> SimpleNamespace:
    count = len(slots)
    return SimpleNamespace(
        req_pool_indices=torch.tensor(slots),
        seq_lens=torch.full((count,), LENGTH - STEPS),
        out_cache_loc=torch.arange(count * STEPS),
    )


def test_padding_leaves_the_buffer_of_slot_0_alone() -> None:
    rows = VerifyRows(coordinator(), STEPS)
    rows.bind(batch(0, 1))
    rows.bind(batch(0))  # the next step; another rank verifies two
    held, order = torch.arange(HOT, dtype=torch.int32)[None], torch.arange(HOT, dtype=torch.int16)[None]
    rows_on_host = torch.arange(LENGTH, dtype=torch.uint8)[:, None]
    before = held.clone(), order.clone()
    answers = torch.zeros((1, TOP_K), dtype=torch.int32)
    reference.swap_in(
        top_k_tokens=torch.tensor([[20, 21, 22, 23]], dtype=torch.int32),
        device_buffer_tokens=held,
        host_cache_locs=torch.arange(LENGTH)[None],
        device_buffer_locs=torch.arange(HOT + 1, dtype=torch.int32)[None],
        host_cache=rows_on_host,
        device_buffer=torch.zeros((HOT + 1, 1), dtype=torch.uint8),
        top_k_device_locs=answers,
        req_pool_indices=torch.tensor([0]),
        seq_lens=rows.lengths[0, 1:2],  # of the padded row
        lru_slots=order,
        item_size_bytes=1,
        num_top_k=TOP_K,
        hot_buffer_size=HOT,
    )
    assert torch.equal(held, before[0]) and torch.equal(order, before[1])
    assert (answers == -1).all()
