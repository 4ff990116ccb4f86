"""An overlay is a record before it is code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .outcome import Verdict
from .source import SourceTree

Around = Callable[..., Any]
"""``hook(original, *args, **kwargs)``: may act before and after, and calls `original` itself."""


@dataclass(frozen=True)
class Hook:
    """`around` is called in place of the function at `target` (``module:qualname``) and given the original first."""

    target: str
    around: Around


@dataclass(frozen=True)
class Overlay:
    """One repair: what is wrong, how it is recognised, and the hooks that put it right."""

    id: str
    """Shared by the overlay's file, its patch file, its tests and its section in the docs."""
    symptom: str
    """One line: what a user sees without it."""
    why: str
    """The cause, and why the hooks cure it."""
    loses: str
    """What a user goes without when the overlay is refused; ends a sentence that starts with "Without it"."""
    rows: tuple[str, ...]
    """Rows of the defect register it settles."""
    origin: str
    """Upstream pull request or issue, or why there is none."""
    remove_when: str
    """The condition under which this file can be deleted."""
    probe: Callable[[SourceTree], Verdict]
    """Recognises the state of the source by structure, never by version."""
    hooks: Callable[[SourceTree], tuple[Hook, ...]]
    """The hooks for this source; asked only when the probe said defective."""
    fixed_since: str | None = None
    """First release that has the fix; None while no release has it."""
    requires: tuple[str, ...] = ()
    """Overlays that must be in place (or already fixed upstream) for this one to be right."""
    group: str = ""
    """Overlays with the same group are applied together or not at all; empty: on its own."""
    no_diff: str = ""
    """Why there is no patch file of it; empty: there is one."""
