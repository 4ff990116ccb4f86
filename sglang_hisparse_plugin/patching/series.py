"""A series of patch files, applied to a source tree that stays untouched.

A folder holds the file ``series``, which lists patch files ``<id>.patch`` in order (as quilt and ``git quiltimport``
read it), and those files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from . import patchfile
from .patchfile import Change, Drift, Patch, PatchError


@dataclass(frozen=True)
class Step:
    """A patch with what it changes in a tree that has the patches before it."""

    patch: Patch
    changes: tuple[Change, ...]


def stored() -> dict[str, Path]:
    """Folders that hold a series, by release, oldest first: packaged with the code, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    root = next((p for p in (package / "patches", package.parent / "patches") if p.is_dir()), package)
    folders = [p.parent for p in root.glob("*/series")]
    return {p.name: p for p in sorted(folders, key=lambda p: Version(p.name))}


def apply(folder: Path, source: Path, into: Path) -> list[str]:
    """Make the empty or absent folder `into` a copy of the tree `source` with the series in `folder` applied.

    Changed files are real; everything else is a link into `source`, which is only read. Put `into` on PYTHONPATH and it
    is the patched package. Returns the ids of the patches.

    Raises:
        PatchError: as `steps`.
    """
    done = list(steps(read(folder), source))
    lay_over(source, {change.path: change.after for step in done for change in step.changes}, into)
    return [step.patch.id for step in done]


def read(folder: Path) -> tuple[Patch, ...]:
    """The patches of a series in order.

    Raises:
        PatchError: a file is missing, malformed, or not in the series.
    """
    names = (folder / "series").read_text("utf-8").split()
    present = {p.name for p in folder.glob("*.patch")}
    if strays := present ^ set(names):
        raise PatchError(f"{folder}: the file series and the patch files disagree about {', '.join(sorted(strays))}")
    return tuple(patchfile.parse(n.removesuffix(".patch"), (folder / n).read_text("utf-8")) for n in names)


def steps(patches: tuple[Patch, ...], source: Path) -> Iterator[Step]:
    """Apply each patch to `source` with the ones before it, in memory, and compile what it changed.

    Raises:
        Drift: `source` is not what a patch was made for.
        PatchError: a changed file does not compile.
    """
    current: dict[str, str] = {}
    for patch in patches:
        changes = []
        for file in patch.files:
            before = current[file.path] if file.path in current else _text(patch, source, file.path)
            changes.append(patchfile.change(patch, file, before))
            current[file.path] = changes[-1].after
        yield Step(patch, tuple(changes))


def lay_over(source: Path, files: Mapping[str, str], into: Path) -> None:
    """Make `into` the tree `source` with the text of some of its `files` (by relative path) replaced."""
    real = {Path(parent) for path in files for parent in Path(path).parents}
    for folder in sorted(real):
        (into / folder).mkdir(parents=True, exist_ok=True)
        for entry in (source / folder).iterdir():
            relative = folder / entry.name
            if relative in real or relative.as_posix() in files or entry.name == "__pycache__":
                continue
            (into / relative).symlink_to(entry.absolute())
    for path, text in files.items():
        (into / path).write_text(text, "utf-8", newline="")


def _text(patch: Patch, source: Path, path: str) -> str:
    try:
        return (source / path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise Drift(patch.id, path, 1, "a file", f"none in {source}") from None
