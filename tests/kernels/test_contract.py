"""A call that breaks the contract is refused before anything is written, in the words of its arguments."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from sglang_hisparse_plugin.kernels import build
from sglang_hisparse_plugin.kernels import swap_in as kernels

HOT, TOP_K, REQUESTS = 6, 4, 2


def call(**changes):
    tables = {
        "top_k_tokens": torch.zeros(1, TOP_K, dtype=torch.int32),
        "device_buffer_tokens": torch.zeros(REQUESTS, HOT + 1, dtype=torch.int32),
        "host_cache_locs": torch.zeros(REQUESTS, 20, dtype=torch.int64),
        "device_buffer_locs": torch.zeros(REQUESTS, HOT + 1, dtype=torch.int32),
        "host_cache": torch.zeros(40, 1, 8, dtype=torch.bfloat16),
        "device_buffer": torch.zeros(20, 1, 8, dtype=torch.bfloat16),
        "top_k_device_locs": torch.full((1, TOP_K), 7, dtype=torch.int32),
        "req_pool_indices": torch.zeros(1, dtype=torch.int64),
        "seq_lens": torch.full((1,), 10, dtype=torch.int32),
        "lru_slots": torch.arange(HOT, dtype=torch.int16).repeat(REQUESTS, 1),
        "item_size_bytes": 16,
        "num_top_k": TOP_K,
        "hot_buffer_size": HOT,
    }
    return tables | changes


def zeros(*shape, dtype=torch.int32, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


BROKEN = [
    ({"num_top_k": 7}, ValueError, "num_top_k is 7 and hot_buffer_size 6"),
    ({"num_top_k": 0}, ValueError, "num_top_k at least 1"),
    ({"hot_buffer_size": 40000}, ValueError, "hot_buffer_size is 40000: lru_slots are int16, so at most 32768"),
    ({"top_k_tokens": zeros(1, 3)}, ValueError, r"top_k_tokens is \[1, 3\]: \[1, 4\] or larger is needed"),
    ({"top_k_tokens": zeros(1, 4, dtype=torch.int64)}, TypeError, "top_k_tokens is torch.int64: torch.int32 is needed"),
    ({"top_k_device_locs": zeros(4, 8)[:, ::2]}, ValueError, "top_k_device_locs has stride 2 within a row"),
    ({"device_buffer_locs": zeros(2, 6)}, ValueError, r"device_buffer_locs is \[2, 6\]: \[2, 7\] or larger"),
    ({"device_buffer_tokens": zeros(1, 7)}, ValueError, r"device_buffer_tokens is \[1, 7\]"),
    ({"host_cache_locs": zeros(2, 20)}, TypeError, "host_cache_locs is torch.int32: torch.int64"),
    ({"lru_slots": zeros(2, 6)}, TypeError, "lru_slots is torch.int32: torch.int16"),
    ({"req_pool_indices": zeros(0)}, ValueError, r"req_pool_indices is \[0\]: \[1\] or longer"),
    ({"seq_lens": zeros(1, dtype=torch.int16)}, TypeError, "seq_lens is torch.int16: torch.int32 or torch.int64"),
    ({"num_real_reqs": zeros(1, dtype=torch.int64)}, TypeError, "num_real_reqs is torch.int64"),
    ({"tail_start": torch.zeros(1)}, TypeError, "tail_start is torch.float32"),
    ({"miss_count": zeros(1)}, ValueError, "miss_src, miss_dst and miss_count are one plan"),
    (
        {"miss_src": zeros(1, 3, dtype=torch.int64), "miss_dst": zeros(1, 4), "miss_count": zeros(1)},
        ValueError,
        r"miss_src is \[1, 3\]",
    ),
    ({"counters": zeros(18)}, TypeError, "counters is torch.int32: torch.int64"),
    ({"counters": zeros(17, dtype=torch.int64)}, ValueError, r"counters is \[17\]: \[18\] or longer"),
    ({"item_size_bytes": 17}, ValueError, "item_size_bytes is 17, a row of host_cache has 16 bytes"),
    ({"item_size_bytes": 0}, ValueError, "item_size_bytes is 0"),
    (
        {"device_buffer": torch.zeros(20, 8, 2, dtype=torch.bfloat16)[:, :, ::2]},
        ValueError,
        "device_buffer has strides .*: the bytes of a row must be contiguous",
    ),
    ({"seq_lens": torch.zeros(1, dtype=torch.int32, device="meta")}, ValueError, "seq_lens is on meta"),
    ({"device_buffer": torch.zeros(20, 8, device="meta")}, ValueError, "device_buffer is on meta"),
    ({"host_cache": torch.zeros(40, 8, device="meta")}, ValueError, "host_cache is on meta: host memory, or memory of"),
    ({"top_k_tokens": zeros(1, 4, device="meta")}, ValueError, "top_k_tokens is on meta, which holds no values"),
    ({"host_cache": torch.zeros(0, 8)}, ValueError, r"host_cache is \[0, 8\]: \[rows, ...\] with a row at least"),
    ({"device_buffer": torch.zeros(0, 8)}, ValueError, r"device_buffer is \[0, 8\]: \[rows, ...\] with a row at least"),
    ({"host_cache": torch.tensor(1.0)}, ValueError, r"host_cache is \[\]: \[rows, ...\] with a row at least"),
    ({"top_k_tokens": torch.tensor(1, dtype=torch.int32)}, ValueError, r"top_k_tokens is \[\]: two dimensions"),
    ({"top_k_tokens": zeros(4)}, ValueError, r"top_k_tokens is \[4\]: two dimensions are needed"),
    ({"lru_slots": torch.tensor(1, dtype=torch.int16)}, ValueError, r"lru_slots is \[\]: two dimensions"),
    ({"seq_lens": zeros(1, 2)}, ValueError, r"seq_lens is \[1, 2\]: one dimension is needed"),
    ({"seq_lens": 10}, TypeError, "seq_lens is of type int: a tensor is needed"),
    ({"top_k_tokens": [[0, 1, 2, 3]]}, TypeError, "top_k_tokens is of type list: a tensor is needed"),
    ({"num_real_reqs": 1}, TypeError, "num_real_reqs is of type int: a tensor is needed"),
    ({"host_cache": None}, TypeError, "host_cache is of type NoneType: a tensor is needed"),
    ({"num_top_k": 4.0}, TypeError, "num_top_k is 4.0: an int is needed"),
    ({"hot_buffer_size": "6"}, TypeError, "hot_buffer_size is '6': an int is needed"),
    ({"item_size_bytes": 16.0}, TypeError, "item_size_bytes is 16.0: an int is needed"),
    (
        {"device_buffer": torch.zeros(1, 8, dtype=torch.bfloat16).expand(20, 8)},
        ValueError,
        r"device_buffer has strides \(0, 1\): its rows overlap",
    ),
    (
        {"lru_slots": torch.arange(HOT, dtype=torch.int16).expand(REQUESTS, HOT)},
        ValueError,
        "lru_slots has rows 0 elements apart: they overlap",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_refused(change, error, message) -> None:
    arguments = call(**change)
    with pytest.raises(error, match=message):
        kernels.swap_in(**arguments)
    assert "top_k_device_locs" in change or bool((arguments["top_k_device_locs"] == 7).all())


def test_sequences_are_shorter_than_tokens_can_be_told_apart(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MAX_TOKENS", 19)
    with pytest.raises(ValueError, match="host_cache_locs has 20 columns: at most 19 tokens can be told apart"):
        kernels.swap_in(**call())


def test_the_contract_itself_is_met() -> None:
    arguments = call()
    kernels.swap_in(**arguments)
    assert bool((arguments["top_k_device_locs"] == 0).all())


def test_tables_may_be_wider_and_outputs_longer() -> None:
    """What lies beyond the buffer's slots and the batch is nobody's to read or write."""
    arguments = call(lru_slots=torch.full((REQUESTS, HOT + 2), HOT + 1, dtype=torch.int16))
    arguments["lru_slots"][:, :HOT] = torch.arange(HOT, dtype=torch.int16)
    arguments["top_k_device_locs"] = torch.full((2, TOP_K), 7, dtype=torch.int32)
    kernels.swap_in(**arguments)
    assert bool((arguments["top_k_device_locs"][1] == 7).all())
    assert bool((arguments["lru_slots"][:, HOT:] == HOT + 1).all())


def test_the_torch_op_is_not_chosen_silently() -> None:
    kernels._compiler.cache_clear()
    with pytest.warns(RuntimeWarning, match="device cpu runs no CUDA kernel. A plain torch implementation serves"):
        kernels.swap_in(**call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.swap_in(**call())  # once is enough


def test_no_compiler_is_named(monkeypatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    kernels._compiler.cache_clear()
    with pytest.warns(RuntimeWarning, match="no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME"):
        assert not kernels._compiler(torch.device("cuda"))
    kernels._compiler.cache_clear()


def test_a_buffer_too_large_for_the_device_is_refused_before_a_launch(monkeypatch) -> None:
    """With the sizes; the largest shape counts. Module and device are stand-ins: no kernel runs here."""
    bytes_of = {shape.shared_bytes_export: lambda size=size: size for size, shape in enumerate(build.shapes(9), 99_997)}
    needed = max(size() for size in bytes_of.values())
    small = SimpleNamespace(major=9, shared_memory_per_block_optin=needed - 1)
    monkeypatch.setattr(kernels, "_compiler", lambda device: True)
    monkeypatch.setattr(build, "swap_in_module", lambda *sizes: SimpleNamespace(**bytes_of))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    kernels._module.cache_clear()
    expected = (
        rf"top_k 4 with a hot buffer of 6 slots needs {needed} bytes .* and this device has {needed - 1}: make the"
    )
    with pytest.raises(ValueError, match=expected):
        kernels.swap_in(**call())
    small.shared_memory_per_block_optin = needed
    assert kernels.swap_in_kernel(torch.device("cuda"), TOP_K, HOT) is not None
    kernels._module.cache_clear()


def test_every_batch_has_a_shape() -> None:
    for major in (8, 9, 10, 12):
        served = [build.shape_for(major, batch) for batch in range(1, 300)]
        assert set(served) == set(build.shapes(major))
        assert all(shape.cluster == 1 for shape in served) or major in (9, 10)
