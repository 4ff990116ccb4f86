"""What the pools have left for new prompts, once everybody who holds slots has what he may still need."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from . import memory, upstream
from .observe import events


class Admission:
    """One pass over the waiting queue.

    Tokens still to be generated are counted as SGLang counts them: clipped, and of those that are
    under way the part that its new-token ratio expects. A hot buffer is counted as large as it can become, and who
    speculates with the positions that a step takes ahead. A request that would have the pools to itself needs room for
    its prompt and one step: nobody could ever make more room.
    """

    def __init__(self, scheduler: Any, running: Any, others: Iterable[Any] = (), clip: int | None = None) -> None:
        """
        Args:
            others: who else may hold slots.
            clip: tokens still to be generated that are counted at most, if not SGLang's CLIP_MAX_NEW_TOKENS.
        """
        self.clip = clip if clip is not None else int(vars(sys.modules[upstream.POLICY])["CLIP_MAX_NEW_TOKENS"])
        self.coordinator = scheduler.hisparse_coordinator
        self.ahead = upstream.tokens_ahead(scheduler)
        self.holders = upstream.holders(scheduler, [*running.reqs, *others])
        self.left: dict[str, int] = {}
        self.receives = scheduler.disaggregation_mode.name == "DECODE"
        """Prompts come by way of the host pool, and never are on the device as a whole."""
        self.admitted = 0
        self.refused: tuple[Any, list[str]] | None = None
        """The request at which the pass ended, and the pools that have no room for it."""

    def lacking(self, req: Any, ratio: float) -> list[str]:
        """The pools with no room for `req`; `ratio` is the part of their tokens that others will generate."""
        if not self.left:
            self.left = {name: int(pool.available_size()) for name, pool in upstream.pools(self.coordinator).items()}
            for holder in self.holders:
                self._subtract(self._needs(holder, int(self._clipped(holder) * ratio), _rest(holder)))
        needs = (
            self._needs(req, self._clipped(req), _rest(req))
            if self.holders or self.admitted
            else self._needs(req, 1, 1)
        )
        return [name for name, slots in needs.items() if slots > self.left[name]]

    def admit(self, req: Any) -> None:
        """`req` is in the batch."""
        self.admitted += 1
        self._subtract(self._needs(req, self._clipped(req), _rest(req)))

    def _needs(self, req: Any, expected: int, most: int) -> dict[str, int]:
        """Slots that `req` has yet to take, if it generates `expected` tokens, and its hot buffer `most`."""
        c = self.coordinator
        ratio, slot = getattr(c, "compress_ratio", 1), upstream.slot(req)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        held = upstream.paged(c, upstream.allocated_len(req)) if slot is not None else 0
        buffered = int(c.req_device_buffer_size[slot]) if slot is not None else 0
        device = memory.hot_buffer(c, tokens + most) - buffered
        if not buffered and not self.receives:
            device = max(device, upstream.paged(c, tokens) // ratio) - held // ratio
        length = tokens + expected + self.ahead
        host = upstream.paged(c, length) if self.ahead else upstream.host_slots_for(c, length // ratio)
        needs = {
            "device": device + upstream.scratch(c, slot),
            "host": host - upstream.host_slots_held(c, req),
            "logical": upstream.paged(c, length) - held,
        }
        return {name: max(0, slots) for name, slots in needs.items()}

    def _clipped(self, req: Any) -> int:
        return min(_rest(req), self.clip)

    def _subtract(self, needs: dict[str, int]) -> None:
        self.left = {name: slots - needs[name] for name, slots in self.left.items()}


def never(coordinator: Any, req: Any, lacking: Sequence[str]) -> str:
    """Count a request that these pools can never hold; what its client is told."""
    events.refused(req, lacking[0])
    return f"The request can never be served. {memory.too_small(coordinator, lacking)}"


def _rest(req: Any) -> int:
    return max(1, int(req.sampling_params.max_new_tokens) - len(req.output_ids))
