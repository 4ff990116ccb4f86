"""Values that name what is not there: the torch op refuses them, and every table and row is as it was."""

from __future__ import annotations

import pytest
import torch
from world import World

from sglang_hisparse_plugin.kernels import swap_in as kernels


def worlds_call():
    """A call of two requests that both miss; the first alone is without fault in every case below."""
    world = World(requests=2, context=40, top_k=4, hot=8)
    for request in range(2):
        world.fill_in_order(request)
    return world.call([0, 1], [[20, 21, 1, 2], [30, 31, 3, 4]], [40, 40], plan=True, counters=True).arguments


def fault(**values):
    """Puts one value into a table of a call: name=(index, value)."""

    def put(call) -> None:
        for name, (index, value) in values.items():
            call[name][index] = value

    return put


def shorter_context(call) -> None:
    call["host_cache_locs"] = call["host_cache_locs"][:, :30]


FAULTS = [
    (fault(req_pool_indices=(1, -1)), r"req_pool_indices\[1\] is -1: the tables have 2 requests"),
    (fault(req_pool_indices=(1, 2)), r"req_pool_indices\[1\] is 2: the tables have 2 requests"),
    (fault(host_cache_locs=((1, 31), 80)), "host_cache_locs: 80 is not in host_cache, which has 80"),
    (fault(host_cache_locs=((1, 30), -2)), "host_cache_locs: -2 is not in host_cache, which has 80"),
    (fault(device_buffer_locs=((1, slice(0, 8)), 26)), "device_buffer_locs: 26 is not in device_buffer, which has 26"),
    (shorter_context, "top_k_tokens that are missed: 30 is not in host_cache_locs, which has 30"),
    (fault(lru_slots=((1, 0), 8)), "lru_slots of request 1 do not hold each slot from 0 to 7 once"),
    (fault(lru_slots=((1, slice(0, 8)), 3)), "lru_slots of request 1 do not hold each slot from 0 to 7 once"),
]


@pytest.mark.parametrize(("put", "said"), FAULTS)
def test_a_value_out_of_range_changes_nothing(put, said: str) -> None:
    call = worlds_call()
    put(call)
    before = {name: given.clone() for name, given in call.items() if isinstance(given, torch.Tensor)}
    with pytest.raises(ValueError, match=said):
        kernels.swap_in(**call)
    changed = [name for name, held in before.items() if not torch.equal(call[name], held)]
    assert not changed


def test_rows_are_not_looked_up_where_none_is_copied() -> None:
    call = worlds_call()
    fault(host_cache_locs=((1, 31), 80))(call)
    kernels.swap_in(**call, skip_io=True)
    assert call["miss_src"][1, 1] == 80


def test_a_request_named_twice_is_served_in_order() -> None:
    """The second row finds what the first has brought."""
    world = World(requests=1, context=40, top_k=4, hot=8)
    world.step(kernels.swap_in, [0, 0], [[20, 21, 22, 23], [20, 21, 30, 31]], [40, 40], plan=True, counters=True)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (fault(miss_count=(1, 5)), r"miss_count\[1\] is 5: the plan has room for 4"),
        (fault(miss_count=(1, -1)), r"miss_count\[1\] is -1: the plan has room for 4"),
        (fault(miss_src=((1, 0), -2)), "miss_src: -2 is not in host_cache, which has 6"),
        (fault(miss_dst=((1, 1), 9)), "miss_dst: 9 is not in device_buffer, which has 9"),
    ],
)
def test_a_plan_out_of_range_copies_nothing(put, said: str) -> None:
    call = {
        "miss_src": torch.zeros(2, 4, dtype=torch.int64),
        "miss_dst": torch.arange(8, dtype=torch.int32).view(2, 4),
        "miss_count": torch.tensor([2, 2], dtype=torch.int32),
        "num_real_reqs": None,
        "host_cache": torch.ones(6, 8),
        "device_buffer": torch.zeros(9, 8),
        "item_size_bytes": 32,
    }
    kernels.copy_planned(**call)
    assert call["device_buffer"].sum(1).tolist() == [8, 8, 0, 0, 8, 8, 0, 0, 0]
    call["device_buffer"].zero_()
    put(call)
    with pytest.raises(ValueError, match=said):
        kernels.copy_planned(**call)
    assert not call["device_buffer"].any()


def test_rows_any_distance_apart() -> None:
    """One number to a row, two numbers apart: what the kernel takes, the torch op takes."""
    host, cache = torch.arange(12.0)[::2], torch.zeros(12)[::2]
    kernels.copy_planned(
        miss_src=torch.tensor([[5, 1]]),
        miss_dst=torch.tensor([[0, 4]], dtype=torch.int32),
        miss_count=torch.tensor([2], dtype=torch.int32),
        num_real_reqs=None,
        host_cache=host,
        device_buffer=cache,
        item_size_bytes=4,
    )
    assert cache.tolist() == [10, 0, 0, 0, 2, 0]
