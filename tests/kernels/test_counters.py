"""What is counted, worked out by hand; the random traces compare the counters too."""

from __future__ import annotations

import pytest
import torch
from world import World

from sglang_hisparse_plugin.kernels.counters import COUNTERS, MISS_BUCKETS, miss_bucket


def counted(world: World, op, selected: list[list[int]], seq_lens: list[int], real: int) -> list[int]:
    """The counters, from zero, after one call for requests 0, 1, ..."""
    batch, device = len(selected), world.device
    counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
    op(
        top_k_tokens=torch.tensor(selected, dtype=torch.int32, device=device),
        device_buffer_tokens=world.tokens,
        host_cache_locs=world.host_locs,
        device_buffer_locs=world.locs,
        host_cache=world.host,
        device_buffer=world.cache,
        top_k_device_locs=torch.empty(batch, world.top_k, dtype=torch.int32, device=device),
        req_pool_indices=torch.arange(batch, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        lru_slots=world.lru,
        item_size_bytes=world.item,
        num_top_k=world.top_k,
        hot_buffer_size=world.hot,
        num_real_reqs=torch.tensor([real], dtype=torch.int32, device=device),
        counters=counters,
    )
    return counters.tolist()


def test_buckets() -> None:
    assert COUNTERS == 18
    assert MISS_BUCKETS == (0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 2047, 4095, None)
    expected = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 7: 3, 8: 4, 1023: 10, 1024: 11, 2048: 12, 4095: 12, 4096: 13, 32768: 13}
    assert {misses: miss_bucket(misses) for misses in expected} == expected


def test_what_is_counted(op, device) -> None:
    """Buffers of 8 hold tokens 0 .. 7. Rows of 16 bytes, top-k of 6, the fifth request pads the batch."""
    world = World(requests=5, context=40, top_k=6, hot=8, device=device)
    for request in range(5):
        world.fill_in_order(request)
    selected = [
        [0, 1, 2, 3, 4, 5],  # six hits
        [0, 20, 21, 20, -1, 40],  # one hit; 20 and 21 miss, 20 again is answered without a copy; two select nothing
        [30, 31, 32, 33, 34, 39],  # five misses, and the newest, which is always there
        [5, 5, -1, 3, 8, 4],  # the whole sequence of 8 lies in the buffer: 8 is past its end; four hits
        [0, 1, 2, 3, 4, 30],
    ]
    counters = counted(world, op, selected, [40, 40, 40, 8, 40], real=4)
    assert counters[:4] == [6 + 2 + 1 + 4, 0 + 2 + 5 + 0, 7 * 16, 4]
    assert counters[4:] == [2, 0, 1, 1] + [0] * 10  # none: two requests; 2 to 3 misses: one; 4 to 7: one


def test_an_answer_of_minus_one_is_counted_by_its_slot(op, device) -> None:
    """An entry that selects nothing has no slot; what `device_buffer_locs` says of a slot is another matter."""
    world = World(requests=2, context=40, top_k=6, hot=8, device=device)
    for request in range(2):
        world.fill_in_order(request)
    world.locs[:, [0, 8]] = -1  # slots of token 0, and of the newest
    counters = counted(world, op, [[0, 1, 2, 3, 39, -1], [0, 1, 2, -1, -1, 8]], [40, 8], real=2)
    assert counters[:4] == [5 + 3, 0, 0, 2]


@pytest.mark.parametrize(("misses", "bucket"), [(1, 1), (2047, 11), (2048, 12), (4095, 12), (4096, 13), (5000, 13)])
def test_large_buckets(op, device, misses, bucket) -> None:
    world = World(requests=1, context=12000, top_k=5000, hot=5001, item=1, device=device)
    world.fill_in_order(0)
    selected = [[*range(6000, 6000 + misses), *range(5000 - misses)]]
    counters = counted(world, op, selected, [12000], real=1)
    assert counters[:4] == [5000 - misses, misses, misses, 1]
    assert counters[4:] == [int(k == bucket) for k in range(14)]
