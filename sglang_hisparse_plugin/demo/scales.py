"""Sizes of a demo, for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import sizes


@dataclass(frozen=True)
class Scale:
    """All lengths in tokens."""

    device: str
    dims: sizes.Dims
    hot_buffer: int
    """Slots per request on the device, without the page for the newest token."""
    device_tokens: int
    """Slots of the device pool; the logical and host pools hold twice as many."""
    slots: int
    """--max-running-requests."""
    long: tuple[int, ...]
    """Lengths of the prompts walked one at a time."""
    crowd: tuple[int, int]
    """Shortest and longest of the prompts walked together."""
    crowd_size: int
    """How many; more than slots."""
    steps: int
    """Tokens of a long walk; more than a lap."""
    crowd_steps: int
    retract_every: int
    """Forward passes from one forced retraction to the next."""
    patience: float
    """Seconds until a server must be ready."""

    @property
    def context(self) -> int:
        """--context-length."""
        return max(*self.long, self.crowd[1]) + self.steps + 64

    def verifying(self, draft_tokens: int) -> Scale:
        """With a hot buffer that holds all that so many tokens can select together."""
        return replace(self, hot_buffer=max(self.hot_buffer, draft_tokens * self.dims.index_topk))


CPU = Scale(
    device="cpu",
    dims=sizes.CPU,
    hot_buffer=128,
    device_tokens=4096,
    slots=4,
    long=(1500, 1000),
    crowd=(500, 900),
    crowd_size=9,
    steps=140,
    crowd_steps=80,
    retract_every=12,
    patience=240,
)
CUDA = Scale(
    device="cuda",
    dims=sizes.CUDA,
    hot_buffer=4096,
    device_tokens=131072,
    slots=8,
    long=(32000, 20000),
    crowd=(9000, 16000),
    crowd_size=14,
    steps=200,
    crowd_steps=200,
    retract_every=40,
    patience=420,
)
SCALES = {scale.device: scale for scale in (CPU, CUDA)}
