"""A recorded miss plan, replayed between the caches of another layer."""

from __future__ import annotations

import pytest
import torch

from sglang_hisparse_plugin.kernels import reference
from sglang_hisparse_plugin.kernels import swap_in as kernels


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def copy_planned(request):
    if request.param == "reference":
        return reference.copy_planned
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return kernels.copy_planned


@pytest.mark.parametrize(("item", "stride"), [(656, 656), (584, 584), (13, 20), (1152, 1152), (8, 16)])
@pytest.mark.parametrize(
    ("counts", "real"), [([5, 0, 64, 1], 4), ([5, 0, 64, 1], 3), ([0, 0], 2), ([7, 9], 0), ([9], None)]
)
def test_every_planned_row_and_no_other(copy_planned, item, stride, counts, real) -> None:
    device = "cpu" if copy_planned is reference.copy_planned else "cuda"
    generator = torch.Generator().manual_seed(len(counts))
    host = torch.randint(0, 256, (500, stride), dtype=torch.uint8, generator=generator)
    cache = torch.randint(0, 256, (400, stride), dtype=torch.uint8, generator=generator)
    src = torch.randint(0, 500, (len(counts), 70), generator=generator)
    dst = torch.randperm(400, generator=generator)[: src.numel()].view_as(src).int()
    expected = cache.clone()
    for row, count in enumerate(counts[:real]):
        for m in range(count):
            expected[dst[row, m], :item] = host[src[row, m], :item]
    cache = cache.to(device)
    copy_planned(
        miss_src=src.to(device),
        miss_dst=dst.to(device),
        miss_count=torch.tensor(counts, dtype=torch.int32, device=device),
        num_real_reqs=None if real is None else torch.tensor([real], dtype=torch.int32, device=device),
        host_cache=host.pin_memory() if device == "cuda" else host,
        device_buffer=cache,
        item_size_bytes=item,
    )
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.gpu
def test_more_requests_than_fit_at_once(copy_planned) -> None:
    if copy_planned is reference.copy_planned:
        pytest.skip("the torch op has no such limit")
    host = torch.arange(2500, dtype=torch.int32).view(-1, 1).pin_memory()
    cache = torch.full((2500, 1), -1, dtype=torch.int32, device="cuda")
    rows = torch.arange(2500, device="cuda").view(-1, 1)
    counts = torch.ones(2500, dtype=torch.int32, device="cuda")
    copy_planned(
        miss_src=rows,
        miss_dst=rows.int(),
        miss_count=counts,
        num_real_reqs=None,
        host_cache=host,
        device_buffer=cache,
        item_size_bytes=4,
    )
    assert torch.equal(cache.cpu(), host)


@pytest.mark.gpu
def test_pageable_host_memory_is_refused(copy_planned) -> None:
    if copy_planned is reference.copy_planned:
        pytest.skip("the torch op reads any memory")
    one = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="pin_memory=True"):
        copy_planned(
            miss_src=one,
            miss_dst=one.int(),
            miss_count=one.view(1).int(),
            num_real_reqs=None,
            host_cache=torch.zeros(1 << 20, 16, dtype=torch.uint8),
            device_buffer=torch.zeros(4, 16, dtype=torch.uint8, device="cuda"),
            item_size_bytes=16,
        )
