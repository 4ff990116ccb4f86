"""Whether a stored series of diffs does to a source what the overlays do at run time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from .outcome import Defective, Fixed, Unknown, Verdict
from .overlay import Overlay
from .patchfile import Patch, PatchError
from .series import lay_over, steps
from .source import SourceTree


def mismatches(patches: tuple[Patch, ...], overlays: Iterable[Overlay], source: Path) -> list[str]:
    """Everything in which the series differs from the overlays on `source`; empty when they are equal.

    Equal means: there is one patch for each overlay whose probe says defective (but for those with `no_diff`), in the
    same order; each patch applies, compiles, turns the verdict of its own probe from defective to fixed, and leaves the
    other verdicts as they were.
    """
    overlays = tuple(overlays)
    verdicts = _probe(overlays, source)
    wanted = [o.id for o in overlays if isinstance(verdicts[o.id], Defective) and not o.no_diff]
    names = [patch.id for patch in patches]
    found = []
    if names != wanted:
        found.append(f"the series is {_names(names)}, but the defective overlays here are {_names(wanted)}")
    files: dict[str, str] = {}
    try:
        for step in steps(patches, source):
            files |= {change.path: change.after for change in step.changes}
            with TemporaryDirectory() as folder:
                lay_over(source, files, Path(folder))
                after = _probe(overlays, Path(folder))
            for name, verdict in after.items():
                kind = Fixed if name == step.patch.id else type(verdicts[name])
                if not isinstance(verdict, kind):
                    found.append(f"{step.patch.id}: the probe of {name} should say {kind.__name__}, {_say(verdict)}")
            verdicts = after
    except PatchError as error:
        found.append(str(error))
    return found


def _probe(overlays: tuple[Overlay, ...], source: Path) -> dict[str, Verdict]:
    tree = SourceTree(source)
    return {overlay.id: overlay.probe(tree) for overlay in overlays}


def _say(verdict: Verdict) -> str:
    if isinstance(verdict, Unknown):
        return f"says Unknown: expected {verdict.expected}, found {verdict.found}"
    return f"says {type(verdict).__name__}: {verdict.evidence}"


def _names(names: list[str]) -> str:
    return ", ".join(names) or "empty"
