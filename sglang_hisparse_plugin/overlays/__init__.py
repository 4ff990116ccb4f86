"""All overlays, in the order in which they are applied."""

from __future__ import annotations

from ..patching.overlay import Overlay

OVERLAYS: tuple[Overlay, ...] = ()
