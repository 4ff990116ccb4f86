"""A series of diffs: read, applied to a source tree that stays untouched, written out again with full context.

A folder holds the file ``series``, which lists patch files ``<id>.patch`` in order (as quilt and ``git quiltimport``
read it), and those files: DEP-3 header fields, then what ``git diff -U0`` prints. Stored without context, a diff quotes
none of the source but the lines it changes; the blob ids in git's ``index`` lines say which file it was made for.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.version import Version
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk, PatchedFile, PatchSet

FIELDS = ("Description", "Origin", "Bug", "Forwarded", "Last-Update")

_INDEX = re.compile(r"^index ([0-9a-f]{7,})\.\.([0-9a-f]{7,}) ", re.MULTILINE)


class PatchError(Exception):
    """A patch file is malformed, or its result does not compile; the text names the patch, file and line."""


class Drift(PatchError):
    """The source is not the one the patch was made for."""

    def __init__(self, patch: str, file: str, line: int, expected: str, found: str) -> None:
        super().__init__(f"{patch}: {file}:{line}: expected {expected}, found {found}")
        self.file, self.line, self.expected, self.found = file, line, expected, found


@dataclass(frozen=True)
class Patch:
    """One patch file."""

    id: str
    fields: Mapping[str, str]
    """DEP-3 header: `FIELDS` and whatever else the file gives."""
    files: tuple[PatchedFile, ...]


@dataclass(frozen=True)
class Change:
    """What a patch makes of one file."""

    path: str
    """Relative to the root of the source tree, with forward slashes."""
    before: str
    after: str


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
    return tuple(parse(name.removesuffix(".patch"), (folder / name).read_text("utf-8")) for name in names)


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
            before = current[file.path] if file.path in current else _source_text(patch, source, file.path)
            after = patched(patch, file, before)
            _compile(patch, file.path, after)
            current[file.path] = after
            changes.append(Change(file.path, before, after))
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


def with_context(step: Step) -> str:
    """The patch file of a step with three lines of context, as ``git apply`` and ``patch -p1`` take it."""
    parts = [f"{name}: {value}\n" for name, value in step.patch.fields.items()] + ["\n"]
    for change in step.changes:
        diff = difflib.unified_diff(
            _lines(change.before), _lines(change.after), f"a/{change.path}", f"b/{change.path}", n=3
        )
        parts.append(f"diff --git a/{change.path} b/{change.path}\n")
        parts.append(f"index {blob_id(change.before)}..{blob_id(change.after)} 100644\n")
        parts.extend(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
    return "".join(parts)


def blob_id(text: str) -> str:
    """What ``git hash-object`` prints for a file with this text."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def parse(name: str, text: str) -> Patch:
    """The patch that `text` describes.

    Raises:
        PatchError: a header field is missing, or the diff is malformed, has context, or does more than change files.
    """
    header, mark, diff = text.partition("\ndiff --git ")
    fields = {name: value.strip() for name, value in HeaderParser().parsestr(header).items()}
    if missing := [name for name in FIELDS if not fields.get(name)]:
        raise PatchError(f"{name}: the header lacks {', '.join(missing)}")
    try:
        files = tuple(PatchSet(io.StringIO(mark.lstrip("\n") + diff, newline="\n")))
    except UnidiffParseError as error:
        raise PatchError(f"{name}: {error}") from error
    for file in files:
        if file.source_file != f"a/{file.path}" or file.target_file != f"b/{file.path}":
            raise PatchError(f"{name}: {file.path}: a diff may change files, not create, remove or rename them")
        if any(line.is_context for hunk in file for line in hunk):
            raise PatchError(f"{name}: {file.path}: has context lines; store what `git diff -U0` prints")
    if not any(hunk for file in files for hunk in file):
        raise PatchError(f"{name}: changes nothing")
    return Patch(name, fields, files)


def _source_text(patch: Patch, source: Path, path: str) -> str:
    try:
        return (source / path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise Drift(patch.id, path, 1, "a file", f"none in {source}") from None


def patched(patch: Patch, file: PatchedFile, text: str) -> str:
    lines, result, taken = _lines(text), [], 0
    for hunk in file:
        removed, added = _sides(hunk)
        start = hunk.source_start - (1 if removed else 0)  # a hunk that only adds names the line it comes after
        if start < taken:
            raise PatchError(f"{patch.id}: {file.path}: the hunk at line {hunk.source_start} is out of order")
        for offset, expected in enumerate(removed):
            found = lines[start + offset] if start + offset < len(lines) else "end of file"
            if found != expected:
                raise Drift(patch.id, file.path, start + offset + 1, repr(expected), repr(found))
        result += lines[taken:start] + added
        taken = start + len(removed)
    after = "".join(result + lines[taken:])
    _check_blobs(patch, file, text, after)
    return after


def _check_blobs(patch: Patch, file: PatchedFile, before: str, after: str) -> None:
    """A hunk that only adds lines has no text to match: the file must be byte for byte the one it was made for."""
    index = _INDEX.search(str(file.patch_info))
    if index is None:
        raise PatchError(f"{patch.id}: {file.path}: no `index` line; store what `git diff -U0` prints")
    if not blob_id(before).startswith(index[1]):
        additions = [hunk.source_start for hunk in file if not hunk.source_length]
        if additions:
            raise Drift(patch.id, file.path, additions[0], f"a file with blob id {index[1]}", blob_id(before))
    elif not blob_id(after).startswith(index[2]):
        raise PatchError(
            f"{patch.id}: {file.path}: the result has blob id {blob_id(after)}, not {index[2]}: edited by hand?"
        )


def _sides(hunk: Hunk) -> tuple[list[str], list[str]]:
    return [n.value for n in hunk if n.is_removed], [n.value for n in hunk if n.is_added]


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="\n").readlines()


def _compile(patch: Patch, path: str, text: str) -> None:
    if not path.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's own
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PatchError(f"{patch.id}: {path}:{error.lineno}: does not compile: {error.msg}") from error
