"""The table of probes, in the order in which their facts are shown."""

from __future__ import annotations

from .examine import Probe
from .probes import flags, gpu, imports, memory, model, overlays, python, sglang, toolchain, transfer

PROBES: tuple[Probe, ...] = (
    python.PROBE,
    sglang.PROBE,
    *imports.PROBES,
    *overlays.PROBES,
    *toolchain.PROBES,
    gpu.PROBE,
    memory.PROBE,
    model.PROBE,
    flags.PROBE,
    transfer.PROBE,
)
