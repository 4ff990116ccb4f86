"""The swap-in op: finds selected tokens in the hot buffer, copies missed rows from host memory, keeps LRU order.

The CUDA kernel and the torch op of ``reference.py`` are interchangeable here, at any step.
"""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import build, reference
from .counters import COUNTERS, MISS_BUCKETS

__all__ = ["COUNTERS", "MISS_BUCKETS", "check_swap_in", "copy_planned", "swap_in", "swap_in_kernel"]

INDEX_TYPES = (torch.int32, torch.int64)
MAX_HOT_BUFFER = 32768
MAX_TOKENS = 2**31 - 2**15  # of a sequence: the kernel could not tell a later one from "no token"
# 16 blocks read scattered rows at 94% or more of what 132 do (H200); the rest of the chip is left to others.
COPY_BLOCKS = 16


def swap_in(
    *,
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    num_real_reqs: Tensor | None = None,
    tail_start: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    counters: Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """Bring each request's selected tokens into its hot buffer and write where they lie on the device.

    A request's buffer slots 0 .. hot_buffer_size-1 hold tokens in LRU order, slot hot_buffer_size the newest token
    (position seq_len-1). A sequence of at most hot_buffer_size tokens lies in the slots in order. All work is done on
    the current stream; nothing is allocated and nothing waits for the host, so it can be captured in a CUDA graph.

    Args:
        top_k_tokens: [batch, >= num_top_k] int32, selected positions. Entries outside [0, seq_len) select nothing;
            a token may be repeated.
        device_buffer_tokens: [requests, >= hot_buffer_size] int32, token in each buffer slot, -1 for none. Updated.
        host_cache_locs: [requests, >= longest sequence] int64, host row of each token.
        device_buffer_locs: [requests, > hot_buffer_size] int32, device row of each buffer slot.
        host_cache: [rows, ...], rows contiguous in themselves; pinned or registered host memory.
        device_buffer: [rows, ...], rows contiguous in themselves. Missed rows are written.
        top_k_device_locs: [batch, >= num_top_k] int32. Every entry is written: the device row, or -1.
        req_pool_indices: [batch] int32 or int64, the row of a request in the tables above. Of an int64 here and below
            the kernel reads the lower 32 bits: values are from 0 to 2^31 - 1.
        seq_lens: [batch] int32 or int64, tokens of a request, the newest included.
        lru_slots: [requests, hot_buffer_size] int16, slots in the order of eviction. Updated.
        item_size_bytes: bytes of a row that are copied; any number from 1 to the size of a row.
        num_real_reqs: [1] int32; rows of the batch from there on are padding. None: no padding.
        tail_start: [batch] int32 or int64. Token t >= tail_start lies in slot hot_buffer_size + 1 + t - tail_start,
            in the extra page, and is neither looked up nor copied. None: no resident tail.
        miss_src, miss_dst, miss_count: [batch, >= num_top_k] int64, [batch, >= num_top_k] int32, [batch] int32; the
            host and device rows of this call's copies, for :func:`copy_planned` on other layers. All or none.
        counters: [COUNTERS] int64, to which are added: entries answered without a copy, misses, bytes copied, requests
            served, and how many of these requests fall in each of MISS_BUCKETS.
        skip_io: update the tables but copy no row (a timing probe).

    Raises:
        ValueError, TypeError: an argument breaks this contract, or the device has too little shared memory for the hot
            buffer.
    """
    call = dict(locals())
    check_swap_in(**call)
    kernel = swap_in_kernel(top_k_tokens.device, num_top_k, hot_buffer_size)
    if kernel is None:
        reference.swap_in(**call)
        return
    kernel(top_k_tokens.size(0))(
        top_k_tokens,
        device_buffer_tokens,
        host_cache_locs,
        device_buffer_locs,
        host_cache,
        device_buffer,
        top_k_device_locs,
        req_pool_indices,
        seq_lens,
        lru_slots,
        num_real_reqs,
        tail_start,
        miss_src,
        miss_dst,
        miss_count,
        counters,
        item_size_bytes,
        skip_io,
    )


def copy_planned(
    *,
    miss_src: Tensor,
    miss_dst: Tensor,
    miss_count: Tensor,
    num_real_reqs: Tensor | None,
    host_cache: Tensor,
    device_buffer: Tensor,
    item_size_bytes: int,
    blocks: int = COPY_BLOCKS,
) -> None:
    """Repeat the copies of a recorded miss plan between another layer's caches.

    Args:
        miss_src, miss_dst, miss_count, num_real_reqs, host_cache, device_buffer, item_size_bytes: as in
            :func:`swap_in`, which recorded the plan.
        blocks: thread blocks that share the work, whatever the batch.

    Raises:
        ValueError, TypeError: an argument breaks this contract.
    """
    device, batch = _place("miss_count", miss_count, 1)
    _vector("miss_count", miss_count, (torch.int32,), 0, device)
    _table("miss_src", miss_src, torch.int64, (batch, 0), device)
    _table("miss_dst", miss_dst, torch.int32, (batch, 0), device)
    if num_real_reqs is not None:
        _vector("num_real_reqs", num_real_reqs, (torch.int32,), 1, device)
    _caches(host_cache, device_buffer, item_size_bytes, device)
    _integers(blocks=blocks)
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}: at least one is needed")
    if _compiler(device):
        build.copy_planned_module().copy_planned(
            miss_src, miss_dst, miss_count, num_real_reqs, host_cache, device_buffer, item_size_bytes, blocks
        )
        return
    reference.copy_planned(
        miss_src=miss_src,
        miss_dst=miss_dst,
        miss_count=miss_count,
        num_real_reqs=num_real_reqs,
        host_cache=host_cache,
        device_buffer=device_buffer,
        item_size_bytes=item_size_bytes,
    )


def swap_in_kernel(device: torch.device, num_top_k: int, hot_buffer_size: int) -> Callable[[int], Any] | None:
    """The compiled kernel for a batch size, or None where the torch op serves.

    Raises:
        build.TooLittleSharedMemory: its tables do not fit in a thread block of this device.
    """
    if not _compiler(device):
        return None
    module, major = _module(device, num_top_k, hot_buffer_size)
    return lambda batch: getattr(module, build.shape_for(major, batch).export)


def check_swap_in(
    *,
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    num_real_reqs: Tensor | None,
    tail_start: Tensor | None,
    miss_src: Tensor | None,
    miss_dst: Tensor | None,
    miss_count: Tensor | None,
    counters: Tensor | None,
    skip_io: bool,
) -> None:
    """Raise unless the arguments keep the contract of :func:`swap_in`. Reads no element of a tensor."""
    _integers(num_top_k=num_top_k, hot_buffer_size=hot_buffer_size)
    if not 1 <= num_top_k <= hot_buffer_size:
        raise ValueError(
            f"num_top_k is {num_top_k} and hot_buffer_size {hot_buffer_size}: a call may miss every selected token, "
            "so the buffer must hold at least num_top_k, and num_top_k at least 1"
        )
    if hot_buffer_size > MAX_HOT_BUFFER:
        raise ValueError(f"hot_buffer_size is {hot_buffer_size}: lru_slots are int16, so at most {MAX_HOT_BUFFER}")
    device, batch = _place("top_k_tokens", top_k_tokens, 2)
    requests = _place("lru_slots", lru_slots, 2)[1]
    _table("top_k_tokens", top_k_tokens, torch.int32, (batch, num_top_k), device)
    _table("top_k_device_locs", top_k_device_locs, torch.int32, (batch, num_top_k), device, written=True)
    _table("device_buffer_tokens", device_buffer_tokens, torch.int32, (requests, hot_buffer_size), device, written=True)
    _table("device_buffer_locs", device_buffer_locs, torch.int32, (requests, hot_buffer_size + 1), device)
    _table("host_cache_locs", host_cache_locs, torch.int64, (requests, 1), device)
    if host_cache_locs.size(1) > MAX_TOKENS:
        raise ValueError(
            f"host_cache_locs has {host_cache_locs.size(1)} columns: at most {MAX_TOKENS} tokens can be told apart"
        )
    _table("lru_slots", lru_slots, torch.int16, (requests, hot_buffer_size), device, written=True)
    _vector("req_pool_indices", req_pool_indices, INDEX_TYPES, batch, device)
    _vector("seq_lens", seq_lens, INDEX_TYPES, batch, device)
    if num_real_reqs is not None:
        _vector("num_real_reqs", num_real_reqs, (torch.int32,), 1, device)
    if tail_start is not None:
        _vector("tail_start", tail_start, INDEX_TYPES, batch, device)
    if miss_src is not None and miss_dst is not None and miss_count is not None:
        _table("miss_src", miss_src, torch.int64, (batch, num_top_k), device, written=True)
        _table("miss_dst", miss_dst, torch.int32, (batch, num_top_k), device, written=True)
        _vector("miss_count", miss_count, (torch.int32,), batch, device)
    elif not (miss_src is miss_dst is miss_count is None):
        raise ValueError("miss_src, miss_dst and miss_count are one plan: pass all three or none")
    if counters is not None:
        _vector("counters", counters, (torch.int64,), COUNTERS, device)
    _caches(host_cache, device_buffer, item_size_bytes, device)


def _integers(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} is {value!r}: an int is needed")


def _place(name: str, tensor: Tensor, dimensions: int) -> tuple[torch.device, int]:
    """Device and first size of the tensor that the others are measured by."""
    _dimensions(name, tensor, dimensions)
    if tensor.is_meta:
        raise ValueError(f"{name} is on meta, which holds no values")
    return tensor.device, tensor.size(0)


def _dimensions(name: str, tensor: Tensor, number: int) -> None:
    _is_tensor(name, tensor)
    if tensor.dim() != number:
        raise ValueError(
            f"{name} is {_shape(tensor)}: {'one dimension is' if number == 1 else 'two dimensions are'} needed"
        )


def _is_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is of type {type(tensor).__name__}: a tensor is needed")


def _table(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    at_least: tuple[int, int],
    device: torch.device,
    *,
    written: bool = False,
) -> None:
    _typed(name, tensor, 2, (dtype,), device)
    if tensor.size(0) < at_least[0] or tensor.size(1) < at_least[1]:
        raise ValueError(f"{name} is {_shape(tensor)}: {list(at_least)} or larger is needed")
    if tensor.stride(1) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(1)} within a row: rows must be contiguous")
    if written and tensor.size(0) > 1 and tensor.stride(0) < at_least[1]:
        raise ValueError(f"{name} has rows {tensor.stride(0)} elements apart: they overlap, and are written")


def _vector(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device) -> None:
    _typed(name, tensor, 1, dtypes, device)
    if tensor.size(0) < length:
        raise ValueError(f"{name} is {_shape(tensor)}: [{length}] or longer is needed")
    if tensor.size(0) > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}: it must be contiguous")


def _typed(name: str, tensor: Tensor, dimensions: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    _dimensions(name, tensor, dimensions)
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}: {' or '.join(map(str, dtypes))} is needed")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tables on {device}")


def _caches(host_cache: Tensor, device_buffer: Tensor, item_size_bytes: int, device: torch.device) -> None:
    _integers(item_size_bytes=item_size_bytes)
    for name, cache in (("host_cache", host_cache), ("device_buffer", device_buffer)):
        _is_tensor(name, cache)
        if cache.dim() == 0 or cache.size(0) == 0:
            raise ValueError(f"{name} is {_shape(cache)}: [rows, ...] with a row at least is needed")
        row = cache[0]
        if not row.is_contiguous():
            raise ValueError(f"{name} has strides {tuple(cache.stride())}: the bytes of a row must be contiguous")
        size = row.numel() * row.element_size()
        if not 1 <= item_size_bytes <= size:
            raise ValueError(f"item_size_bytes is {item_size_bytes}, a row of {name} has {size} bytes")
    if device_buffer.device != device:
        raise ValueError(f"device_buffer is on {device_buffer.device}, the tables on {device}")
    if host_cache.device != device and host_cache.device.type != "cpu":
        raise ValueError(f"host_cache is on {host_cache.device}: host memory, or memory of {device}, is needed")
    if device_buffer.size(0) > 1 and device_buffer.stride(0) * device_buffer.element_size() < item_size_bytes:
        raise ValueError(
            f"device_buffer has strides {tuple(device_buffer.stride())}: its rows overlap, and are written"
        )


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


@functools.cache
def _module(device: torch.device, num_top_k: int, hot_buffer_size: int) -> tuple[Any, int]:
    """The module for this device, which has the shared memory for it, and the device's major compute capability."""
    properties = torch.cuda.get_device_properties(device)
    module = build.swap_in_module(num_top_k, hot_buffer_size, properties.major)
    available = properties.shared_memory_per_block_optin
    build.check_shared_memory(module, num_top_k, hot_buffer_size, properties.major, available)
    return module, properties.major


@functools.cache
def _compiler(device: torch.device) -> bool:
    """Whether kernels can be compiled for `device`. Where they cannot, the first call says so."""
    if device.type != "cuda" or torch.version.hip:
        missing = f"device {device} runs no CUDA kernel"
    elif build.find_nvcc() is None:
        missing = "no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME"
    else:
        return True
    warnings.warn(
        f"HiSparse swap-in: {missing}. A plain torch implementation serves instead: it is slow and cannot be captured "
        "in a CUDA graph",
        RuntimeWarning,
        stacklevel=3,
    )
    return False
