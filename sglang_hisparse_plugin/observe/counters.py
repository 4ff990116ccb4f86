"""Counters of the swap-in: one row per layer on the device, added to by the kernel and read without holding it up."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..kernels.counters import COUNTERS
from .aside import Aside


class Counters:
    """The counters of one coordinator.

    Args:
        lru_slots: the coordinator's [layers, requests, hot_buffer_size] int16; a call is told by the layer it passes.
    """

    def __init__(self, lru_slots: Tensor) -> None:
        self._layers = lru_slots
        self._device = torch.zeros(lru_slots.size(0), COUNTERS, dtype=torch.int64, device=lru_slots.device)
        self._rows = list(self._device.unbind())
        self._aside = Aside(lru_slots.device)
        self._host = self._aside.host(*self._device.shape, dtype=torch.int64)
        self._told = torch.zeros(self._host.shape, dtype=torch.int64)
        self._reading = threading.Lock()  # metrics and log line are told by threads of their own

    def row(self, layer: int) -> Tensor:
        """[COUNTERS] int64 of a layer; its address never changes, so a CUDA graph may hold it."""
        return self._rows[layer]

    def read(self) -> list[list[int]]:
        """[layers][COUNTERS], totals since the start; a layer that is being counted may be a few calls ahead.

        Neither the decode stream nor the thread that launches on it waits, see `aside.py`. A call counts its misses as
        hits for a moment (`csrc`), so a hit read in that moment may be taken back: what was told is not.
        """
        with self._reading:
            self._told = torch.maximum(self._told, self._aside.copy(self._host, self._device))
            counts: list[list[int]] = self._told.tolist()
        return counts


_attached: dict[int, Counters] = {}


def attach(lru_slots: Tensor) -> Counters:
    """Count the swap-ins that pass a layer of `lru_slots` from now on."""
    counters = Counters(lru_slots)
    _attached[_storage(lru_slots)] = counters
    return counters


def attached() -> list[Counters]:
    """All there are in this process, in the order in which they were attached."""
    return list(_attached.values())


def detach_all() -> None:
    """Count nothing any more."""
    _attached.clear()


def row_for(lru_slots: Tensor) -> Tensor | None:
    """The counters for a call with this layer's [requests, hot_buffer_size]; None when nobody counts."""
    if not _attached:
        return None
    counters = _attached.get(_storage(lru_slots))
    return counters.row(layer_of(lru_slots)) if counters else None


def layer_of(lru_slots: Tensor) -> int:
    """The layer of a view ``lru_slots[layer]`` of a contiguous [layers, requests, hot_buffer_size]."""
    layer: int = lru_slots.storage_offset() // max(1, lru_slots.numel())
    return layer


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
