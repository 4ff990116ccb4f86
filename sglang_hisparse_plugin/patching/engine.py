"""Plan, apply, verify, undo.

A plan is made from source alone and promises nothing; the ledger says what was done; `verify` says what is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hooker import Hooker, HookError, Shim, in_place, remove, shims
from .outcome import Absent, Applied, Defective, Fixed, Outcome, Refused, Skipped, Unknown
from .overlay import Around, Overlay
from .source import SourceTree

Plan = Mapping[str, Outcome]
"""Outcome by overlay id, in overlay order. `Applied` in a plan means: will be applied."""

LEFT_OUT = Skipped("left out on request")


@dataclass
class Patch:
    """One hook that was handed to a hooker. Inactive, it passes every call through."""

    overlay: str
    target: str
    shim: Shim
    active: bool = True


@dataclass
class Ledger:
    """Everything applied in this process, and what became of every overlay."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    patches: list[Patch] = field(default_factory=list)

    def of(self, overlay: str) -> list[Patch]:
        """The patches of one overlay."""
        return [p for p in self.patches if p.overlay == overlay]


def plan(overlays: Iterable[Overlay], tree: SourceTree, skip: Iterable[str] = ()) -> dict[str, Outcome]:
    """Probe every overlay against `tree`; nothing is imported or changed."""
    overlays = tuple(overlays)
    unwanted = set(skip)
    outcomes: dict[str, Outcome] = {o.id: LEFT_OUT if o.id in unwanted else _judge(o, tree) for o in overlays}
    _settle(overlays, outcomes)
    return outcomes


def apply(
    overlays: Iterable[Overlay], tree: SourceTree, planned: Plan, hooker_for: Callable[[str], Hooker], ledger: Ledger
) -> None:
    """Put every planned overlay in place, a group as one transaction. What is in the ledger already stays as it is.

    `hooker_for(target)` chooses the way in. Outcomes go to the ledger; nothing is raised.
    """
    overlays = tuple(overlays)
    new = [o for o in overlays if o.id not in ledger.outcomes]
    ledger.outcomes.update({o.id: planned[o.id] for o in new})
    for overlay in new:
        if not isinstance(ledger.outcomes[overlay.id], Applied):
            continue
        try:
            _install(overlay, tree, hooker_for, ledger)
        except Exception as error:  # whatever a strange source does to us, the server must not half-start
            withdraw(overlays, ledger, overlay.id, _sentence(error))
    _settle(overlays, ledger.outcomes)
    for overlay in overlays:
        if not isinstance(ledger.outcomes[overlay.id], Applied):
            _undo(ledger, overlay.id)


def verify(overlays: Iterable[Overlay], ledger: Ledger) -> None:
    """Check that calls reach every applied overlay now, and reach it once; withdraw the group of one that fails."""
    overlays = tuple(overlays)
    for overlay in overlays:
        patches = [patch for patch in ledger.of(overlay.id) if patch.active]
        if lost := [p.target for p in patches if not in_place(p.target, p.shim)]:
            withdraw(overlays, ledger, overlay.id, f"the patch of {', '.join(lost)} is not in place")
        elif others := [home for p in patches if (home := _other_copy(p.target, overlay.id, p.shim))]:
            withdraw(overlays, ledger, overlay.id, f"another copy of the plugin, in {others[0]}, has patched it too")


def withdraw(overlays: Iterable[Overlay], ledger: Ledger, overlay_id: str, evidence: str) -> None:
    """Refuse an overlay after the fact, with everything that shares its transaction or needs it."""
    overlays = tuple(overlays)
    loses = next(o.loses for o in overlays if o.id == overlay_id)
    ledger.outcomes[overlay_id] = Refused(f"Without it {loses}", evidence)
    _settle(overlays, ledger.outcomes)
    for overlay in overlays:
        if not isinstance(ledger.outcomes.get(overlay.id), Applied):
            _undo(ledger, overlay.id)


def undo(ledger: Ledger) -> list[str]:
    """Take everything out again. Returns the targets that somebody has wrapped since: there our hook stays, passing
    every call through."""
    buried = [target for overlay in list(ledger.outcomes) for target in _undo(ledger, overlay)]
    ledger.outcomes.clear()
    return buried


def _judge(overlay: Overlay, tree: SourceTree) -> Outcome:
    try:
        verdict = overlay.probe(tree)
    except Exception as error:
        verdict = Unknown("source that the probe can read", _sentence(error))
    if isinstance(verdict, Defective):
        return Applied(overlay.symptom)
    if isinstance(verdict, Fixed):
        since = f"already fixed (upstream since {overlay.fixed_since})" if overlay.fixed_since else "not needed"
        return Skipped(f"{since}: {verdict.evidence}")
    if isinstance(verdict, Absent):
        return Skipped(verdict.evidence)
    return Refused(f"Without it {overlay.loses}", f"expected {verdict.expected}; found {verdict.found}")


def _settle(overlays: tuple[Overlay, ...], outcomes: dict[str, Outcome]) -> None:
    """Refuse what depends on, or shares a transaction with, something refused or left out, until nothing changes."""
    changed = True
    while changed:
        changed = False
        for overlay in overlays:
            if not isinstance(outcomes.get(overlay.id), Applied):
                continue
            partners = [o for o in overlays if o.id in overlay.requires or (overlay.group and o.group == overlay.group)]
            missing = [o.id for o in partners if _is_missing(outcomes.get(o.id))]
            if missing:
                outcomes[overlay.id] = Refused(
                    f"Without it {overlay.loses}", f"it only makes sense with {', '.join(missing)}"
                )
                changed = True


def _is_missing(outcome: Outcome | None) -> bool:
    return isinstance(outcome, Refused) or outcome == LEFT_OUT


def _install(overlay: Overlay, tree: SourceTree, hooker_for: Callable[[str], Hooker], ledger: Ledger) -> None:
    for hook in overlay.hooks(tree):
        if home := _other_copy(hook.target, overlay.id):
            raise HookError(f"another copy of the plugin, in {home}, has patched {hook.target}")
        patch = Patch(overlay.id, hook.target, shim=_nothing)
        patch.shim = _switch(patch, hook.around)
        hooker_for(hook.target).install(hook.target, patch.shim)
        ledger.patches.append(patch)


def _other_copy(target: str, overlay_id: str, own: Shim | None = None) -> str | None:
    """Where the copy of this package lives whose hook for the same overlay is nearest to the original, if not `own`."""
    same = [shim for shim in shims(target) if vars(shim)["hisparse_overlay"] == overlay_id]
    return vars(same[-1])["hisparse_home"] if same and same[-1] is not own else None


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"


def _switch(patch: Patch, around: Around) -> Shim:
    """`around` with a switch, and marks by which another copy of this package knows it."""

    def shim(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if patch.active else original(*args, **kwargs)

    vars(shim).update(hisparse_overlay=patch.overlay, hisparse_home=str(Path(__file__).parent.parent))
    return shim


def _nothing(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _undo(ledger: Ledger, overlay_id: str) -> list[str]:
    """Switch an overlay's patches off and remove those that are still outermost; the targets of the others."""
    buried = []
    for patch in reversed(ledger.of(overlay_id)):
        patch.active = False
        if in_place(patch.target, patch.shim) and not remove(patch.target, patch.shim):
            buried.append(patch.target)
        ledger.patches.remove(patch)
    return buried
