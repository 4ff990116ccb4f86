"""A patch file: a DEP-3 header, then a diff without context that is applied exactly or not at all.

Without context a diff quotes none of the source but the lines it changes. What a hunk removes must be found in place.
One that only adds has nothing to be found: the blob id in git's ``index`` line says which file it was made for.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

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
    """A patch file as read."""

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


def parse(name: str, text: str) -> Patch:
    """The patch that `text` describes.

    Raises:
        PatchError: a header field is missing, or the diff is malformed, has context, or does more than change files.
    """
    header, mark, diff = text.partition("\ndiff --git ")
    fields = {key: value.strip() for key, value in HeaderParser().parsestr(header).items()}
    if missing := [key for key in FIELDS if not fields.get(key)]:
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


def change(patch: Patch, file: PatchedFile, before: str) -> Change:
    """What `patch` makes of `file`, whose text is `before`.

    Raises:
        Drift: `before` is not what the patch was made for.
        PatchError: the result does not compile, or is not what the patch says it is.
    """
    lines, result, taken = _lines(before), [], 0
    for hunk in file:
        removed = [line.value for line in hunk if line.is_removed]
        start = hunk.source_start - (1 if removed else 0)  # a hunk that only adds names the line it comes after
        if start < taken:
            raise PatchError(f"{patch.id}: {file.path}: the hunk at line {hunk.source_start} is out of order")
        for number, expected in enumerate(removed, start):
            found = lines[number] if number < len(lines) else "end of file"
            if found != expected:
                raise Drift(patch.id, file.path, number + 1, repr(expected), repr(found))
        result += lines[taken:start] + [line.value for line in hunk if line.is_added]
        taken = start + len(removed)
    after = "".join(result + lines[taken:])
    _check_blobs(patch, file, before, after)
    _compile(patch, file.path, after)
    return Change(file.path, before, after)


def with_context(patch: Patch, changes: tuple[Change, ...]) -> str:
    """`patch` with three lines of context, as ``git apply`` and ``patch -p1`` take it."""
    parts = [f"{name}: {value}\n" for name, value in patch.fields.items()] + ["\n"]
    for made in changes:
        diff = difflib.unified_diff(_lines(made.before), _lines(made.after), f"a/{made.path}", f"b/{made.path}", n=3)
        parts.append(f"diff --git a/{made.path} b/{made.path}\n")
        parts.append(f"index {blob_id(made.before)}..{blob_id(made.after)} 100644\n")
        parts.extend(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)
    return "".join(parts)


def blob_id(text: str) -> str:
    """What ``git hash-object`` prints for a file with this text."""
    data = text.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _check_blobs(patch: Patch, file: PatchedFile, before: str, after: str) -> None:
    index = _INDEX.search(str(file.patch_info))
    if index is None:
        raise PatchError(f"{patch.id}: {file.path}: no `index` line; store what `git diff -U0` prints")
    if not blob_id(before).startswith(index[1]):
        additions = [hunk.source_start for hunk in file if not hunk.source_length]
        if additions:
            raise Drift(patch.id, file.path, additions[0], f"a file with blob id {index[1]}", blob_id(before))
    elif not blob_id(after).startswith(index[2]):
        made = f"the result has blob id {blob_id(after)}, not {index[2]}"
        raise PatchError(f"{patch.id}: {file.path}: {made}: was the diff edited by hand?")


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="\n").readlines()


def _compile(patch: Patch, path: str, text: str) -> None:
    if not path.endswith(".py"):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source's own
            compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise PatchError(f"{patch.id}: {path}:{error.lineno}: does not compile: {error.msg}") from error
