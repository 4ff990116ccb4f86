"""Records which tokens a running server selects, on request, into a bounded file, off the decode path.

The swap-in's hook captures a few torch operations into the CUDA graph of each recorded layer: they append a row for
each request to a ring on the device while a flag on the device says so. A thread drains the ring into the file. So it
works under CUDA graphs and without. Asked for by a file ``record`` in the folder, which holds seconds and MiB.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from .. import config, upstream
from .counters import POLL, layer_of
from .tracefile import HEAD, REQUEST, header

logger = logging.getLogger(__name__)

RING_BYTES = 64 << 20  # of device memory, while traces can be asked for
SPREAD = 4  # layers recorded when none are named
TICK = 0.25  # seconds between two looks at the request file or the ring


class Ring:
    """Rows of ``[layer, slot, generation, length, tokens...]`` int32 on the device, oldest overwritten first.

    Args:
        layers: which are recorded.
        slots: request slots of the coordinator.
        top_k: tokens per row.
    """

    def __init__(self, layers: tuple[int, ...], slots: int, top_k: int, device: torch.device) -> None:
        self.layers, self.top_k, self.device = layers, top_k, device
        self.width = HEAD + top_k
        self.capacity = max(64, RING_BYTES // (4 * self.width))
        # One more row takes what is not to be kept: padding, and everything while nothing is recorded.
        self.rows = torch.zeros(self.capacity + 1, self.width, dtype=torch.int32, device=device)
        self.written = torch.zeros(1, dtype=torch.int64, device=device)
        self.armed = torch.zeros(1, dtype=torch.int64, device=device)
        self.generation = torch.zeros(slots, dtype=torch.int32, device=device)

    def append(self, layer: int, slots: Tensor, lengths: Tensor, tokens: Tensor, real: Tensor | None) -> None:
        """Add a call. Nothing is read back, so it can be captured; allocations come from the graph's own pool."""
        batch = tokens.size(0)
        at = torch.arange(batch, device=self.device)
        kept = self.armed.expand(batch) if real is None else (at < real) * self.armed
        place = torch.where(kept > 0, (self.written + at) % self.capacity, self.capacity)
        slots = slots.long()
        heads = (torch.full_like(at, layer), slots, self.generation[slots], lengths)
        row = torch.cat([torch.stack([head.int() for head in heads], 1), tokens[:, : self.top_k].int()], 1)
        self.rows.index_copy_(0, place, row)
        self.written += kept.sum()


class Recorder:
    """The thread that waits for a request and writes the file. A full disk ends the recording, not the server."""

    def __init__(self, ring: Ring, folder: Path, hot_buffer: int, item_bytes: int, model_layers: int) -> None:
        self.ring, self.folder = ring, folder
        self.about: dict[str, Any] = {"hot_buffer": hot_buffer, "item_bytes": item_bytes, "top_k": ring.top_k}
        self.about |= {"layers": ring.layers, "model_layers": model_layers}
        self._seen = self._asked_at()
        self._stream: Any = torch.cuda.Stream(ring.device) if ring.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, name="hisparse-trace", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _asked_at(self) -> int:
        try:
            return (self.folder / REQUEST).stat().st_mtime_ns
        except OSError:
            return 0

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            asked = self._asked_at()
            if asked in (0, self._seen):
                continue
            self._seen = asked
            try:
                self.record(*self._limits())
            except Exception as error:  # disk full, folder gone, no number: the server goes on
                logger.warning("HiSparse trace: nothing recorded: %s: %s", type(error).__name__, error)

    def _limits(self) -> tuple[float, int]:
        asked = json.loads((self.folder / REQUEST).read_text("utf-8"))
        return float(asked["seconds"]), int(float(asked["mib"]) * (1 << 20))

    def record(self, seconds: float, most_bytes: int) -> Path:
        """Record until either limit is reached; returns the file.

        Raises:
            OSError: the file cannot be written; what was written of it is removed.
        """
        target = self.folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.hisparse"
        part = target.with_suffix(".part")
        try:
            with part.open("wb") as file:
                rows, dropped = self._drain(file, time.monotonic() + seconds, most_bytes)
            part.rename(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            self._arm(False)
        logger.info("HiSparse trace: %s rows in %s, %s lost", rows, target, dropped)
        return target

    def _drain(self, file: IO[bytes], until: float, most_bytes: int) -> tuple[int, int]:
        file.write(header(self.about))
        ring, row_bytes = self.ring, 4 * self.ring.width
        most = max(0, most_bytes - file.tell()) // row_bytes
        done = start = self._written()
        kept = 0
        self._arm(True)
        while kept < most and time.monotonic() < until:
            time.sleep(TICK)
            if time.monotonic() >= until:
                self._arm(False)
            end = self._written()
            done = max(done, end - ring.capacity)  # older ones are overwritten
            rows = self._copy(done, min(end, done + most - kept))
            overrun = max(0, self._written() - ring.capacity - done)  # overwritten while they were copied
            rows = rows[overrun:]
            file.write(rows.numpy().tobytes())
            kept += rows.size(0)
            done = min(end, done + most - (kept - rows.size(0)))
        self._arm(False)
        return kept, done - start - kept

    def _copy(self, start: int, end: int) -> Tensor:
        at = torch.arange(start, end) % self.ring.capacity
        return self._fetch(lambda: self.ring.rows[at.to(self.ring.device)])

    def _written(self) -> int:
        return int(self._fetch(lambda: self.ring.written)[0])

    def _arm(self, on: bool) -> None:
        self._aside(lambda: self.ring.armed.fill_(int(on)))

    def _fetch(self, read: Any) -> Tensor:
        def copy() -> Tensor:
            found = read()
            if found.device.type == "cpu":
                return found.clone()
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            return host.copy_(found, non_blocking=True)

        result: Tensor = self._aside(copy)
        return result

    def _aside(self, work: Any) -> Any:
        """Do `work` on the side stream, and wait for it without holding the device or the interpreter up."""
        if self._stream is None:
            return work()
        with torch.cuda.stream(self._stream):
            result = work()
            finished = torch.cuda.Event()
            finished.record(self._stream)
        while not finished.query():
            time.sleep(POLL)
        return result


_rings: list[tuple[Ring, Recorder]] = []  # of the first coordinator: the target model's


def attach(coordinator: Any, wanted: config.Observation) -> None:
    """Make a ring for this coordinator, unless there is one."""
    if _rings:
        return
    lru: Tensor = coordinator.lru_slots
    number = lru.size(0)
    spread = tuple(sorted({i * (number - 1) // max(1, SPREAD - 1) for i in range(SPREAD)}))
    layers = tuple(layer for layer in wanted.trace_layers if layer < number) or spread
    ring = Ring(layers, lru.size(1), coordinator.top_k, lru.device)
    folder = Path(wanted.trace_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("HiSparse trace: no trace can be recorded: %s", error)
        return
    _rings.append((ring, Recorder(ring, folder, lru.size(2), upstream.row_bytes(coordinator), number)))


def recorder() -> Recorder | None:
    """The recorder of this process."""
    return _rings[0][1] if _rings else None


def record(call: dict[str, Any]) -> None:
    """Append a swap-in's selection, if its layer is one of those recorded."""
    if _rings:
        ring = _rings[0][0]
        layer = layer_of(call["lru_slots"])
        if layer in ring.layers:
            names = ("req_pool_indices", "seq_lens", "top_k_tokens", "num_real_reqs")
            slots, lengths, tokens, real = (call.get(name) for name in names)
            ring.append(layer, slots, lengths, tokens, real)


def forget(slot: int) -> None:
    """What comes from this slot next is another request."""
    if _rings:
        _rings[0][0].generation[slot] += 1


def detach_all() -> None:
    """Record nothing any more."""
    _rings.clear()
