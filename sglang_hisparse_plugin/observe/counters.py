"""Counters of the swap-in: one row per layer on the device, added to by the kernel and read without holding it up."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..kernels.counters import COUNTERS

POLL = 0.001  # seconds between two looks at whether the copy has arrived


class Counters:
    """The counters of one coordinator.

    Args:
        lru_slots: the coordinator's [layers, requests, hot_buffer_size] int16; a call is told by the layer it passes.
    """

    def __init__(self, lru_slots: Tensor) -> None:
        self._layers = lru_slots
        self._device = torch.zeros(lru_slots.size(0), COUNTERS, dtype=torch.int64, device=lru_slots.device)
        self._rows = list(self._device.unbind())
        self._host: Tensor | None = None
        self._stream: Any = None

    def row(self, layer: int) -> Tensor:
        """[COUNTERS] int64 of a layer; its address never changes, so a CUDA graph may hold it."""
        return self._rows[layer]

    def read(self) -> list[list[int]]:
        """[layers][COUNTERS], totals since the start; a layer that is being counted may be a few calls ahead.

        On CUDA a side stream copies into pinned memory and an event is polled: neither the decode stream nor the
        thread that launches on it waits. Not to be called while a graph is being captured.
        """
        if self._device.device.type != "cuda":
            return self._numbers(self._device)
        if self._host is None:
            self._stream = torch.cuda.Stream(self._device.device)
            self._host = torch.empty(self._device.shape, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        while not copied.query():
            time.sleep(POLL)
        return self._numbers(self._host)

    @staticmethod
    def _numbers(counts: Tensor) -> list[list[int]]:
        return [[int(n) for n in row] for row in counts.tolist()]


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
