"""All overlays, in the order in which they are applied."""

from __future__ import annotations

from ..patching.overlay import Overlay
from . import (
    admission_memory,
    batch_full,
    checksum_drop,
    chunked_abort,
    decode_memory,
    direct_flag,
    finish_unbuffered,
    idle_staging,
    observe,
    pause_staged,
    pp_layer,
    quick_finish,
    retract_once,
    retract_order,
    slot_count,
    speculative,
    speculative_guard,
    staged_batch,
    staging_abort,
    staging_memory,
    swap_in,
    tp_ready,
)

#: What the coordinator does comes before who calls it, so that no caller is sent to a coordinator that cannot cope.
OVERLAYS: tuple[Overlay, ...] = (
    tp_ready.OVERLAY,
    pp_layer.OVERLAY,
    finish_unbuffered.OVERLAY,
    retract_once.OVERLAY,
    direct_flag.OVERLAY,
    retract_order.OVERLAY,
    pause_staged.OVERLAY,
    staging_abort.OVERLAY,
    quick_finish.OVERLAY,
    checksum_drop.OVERLAY,
    chunked_abort.OVERLAY,
    batch_full.OVERLAY,
    slot_count.OVERLAY,
    idle_staging.OVERLAY,
    staged_batch.OVERLAY,
    decode_memory.OVERLAY,
    staging_memory.OVERLAY,
    admission_memory.OVERLAY,
    swap_in.OVERLAY,
    observe.OVERLAY,
    speculative.OVERLAY,
    speculative_guard.OVERLAY,
)
