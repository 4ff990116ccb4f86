"""The KV transfers of `sgl_kernel.kvcacheio`, byte for byte, between buffers given by address."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np


def adapt(module: ModuleType) -> None:
    """Set the transfers HiSparse calls in a module that defines or imports them."""
    for transfer in (transfer_kv_all_layer_mla, transfer_kv_per_layer_mla):
        setattr(module, transfer.__name__, transfer)


def transfer_kv_all_layer_mla(  # noqa: PLR0917 (SGLang's signature)
    src_layers: Any,
    dst_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
    **launch: Any,
) -> None:
    """Row `src_indices[i]` of every layer to row `dst_indices[i]`.

    Args:
        src_layers, dst_layers: (num_layers,) addresses of the layers' buffers.
        src_indices, dst_indices: (n,) integer rows.
        item_size: bytes per row.
    """
    for layer in range(num_layers):
        _copy_rows(int(src_layers[layer]), int(dst_layers[layer]), src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla(
    src: Any, dst: Any, src_indices: Any, dst_indices: Any, item_size: int, **launch: Any
) -> None:
    """The same for one layer; `src` and `dst` are its (contiguous) buffers."""
    _copy_rows(src.data_ptr(), dst.data_ptr(), src_indices, dst_indices, item_size)


def _copy_rows(src: int, dst: int, src_indices: Any, dst_indices: Any, item_size: int) -> None:
    if src_indices.numel() != dst_indices.numel():
        raise ValueError(f"{src_indices.numel()} source rows for {dst_indices.numel()} destination rows")
    if src_indices.numel() == 0:
        return
    source, target = src_indices.cpu().numpy(), dst_indices.cpu().numpy()
    _rows(dst, target, item_size)[target] = _rows(src, source, item_size)[source]


def _rows(address: int, indices: np.ndarray[Any, Any], item_size: int) -> np.ndarray[Any, Any]:
    if indices.min() < 0:
        raise IndexError(f"negative row {indices.min()}")
    count = int(indices.max()) + 1
    raw = (ctypes.c_uint8 * (count * item_size)).from_address(address)
    return np.ctypeslib.as_array(raw).reshape(count, item_size)


def adapt_pool(module: ModuleType) -> None:
    """Set the write of new rows in SGLang's memory pool module."""
    module.set_mla_kv_buffer_triton = set_mla_kv_buffer_triton  # type: ignore[attr-defined]
    # from 0.5.20; the same thing with one rank, which is all there is here
    module.set_mla_kv_buffer_dcp_sharded_triton = set_mla_kv_buffer_triton  # type: ignore[attr-defined]


def set_mla_kv_buffer_triton(kv_buffer: Any, loc: Any, cache_k_nope: Any, cache_k_rope: Any) -> None:
    """New rows into the pool. The Triton kernel would run interpreted, a row at a time, or not at all for many rows.

    Args:
        kv_buffer: (rows, 1, nope + rope). loc: (n,) integer rows.
        cache_k_nope, cache_k_rope: (n, 1, nope), (n, 1, rope).
    """
    nope = cache_k_nope.shape[-1]
    kv_buffer[loc.long(), ..., :nope], kv_buffer[loc.long(), ..., nope:] = cache_k_nope, cache_k_rope
