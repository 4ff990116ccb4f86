"""Which tokens a running server selects, recorded on request, off the decode path.

The swap-in's hook captures a few torch operations into the CUDA graph of each recorded layer: they append a row for
each request to a ring on the device while a flag on the device says so. A thread drains the ring into a file
(`recorder.py`). So it works under CUDA graphs and without.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import config, upstream
from . import request
from .counters import layer_of
from .recorder import Recorder
from .ring import Ring

logger = logging.getLogger(__name__)

SPREAD = 4  # layers recorded when none are named

_rings: list[tuple[Ring, Recorder]] = []  # of the first coordinator: the target model's


def attach(coordinator: Any, wanted: config.Config) -> None:
    """Make a ring for this coordinator, unless there is one."""
    if _rings:
        return
    folder = Path(wanted.trace_dir)
    if reason := request.unusable(folder):
        logger.warning("HiSparse trace: no trace can be recorded: %s", reason)
        return
    lru: Tensor = coordinator.lru_slots
    layers = recorded_layers(wanted.trace_layers, lru.size(0))
    ring = Ring(layers, lru.size(1), coordinator.top_k, lru.device)
    about = {"hot_buffer": lru.size(2), "item_bytes": upstream.row_bytes(coordinator), "model_layers": lru.size(0)}
    _rings.append((ring, Recorder(ring, folder, about)))


def recorded_layers(wanted: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Those of `wanted` that a model of `number` layers has; if it has none of them, a few, evenly spread."""
    if missing := [layer for layer in wanted if layer >= number]:
        logger.warning(
            "HiSparse trace: %s names layers %s, but there are 0 to %s",
            config.TRACE_LAYERS_VARIABLE,
            ", ".join(map(str, missing)),
            number - 1,
        )
    spread = tuple(sorted({i * (number - 1) // max(1, SPREAD - 1) for i in range(SPREAD)}))
    return tuple(layer for layer in wanted if layer < number) or spread


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
