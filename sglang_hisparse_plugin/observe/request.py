"""How a trace is asked for, between processes that share nothing but a folder.

``record`` in the folder asks: ``{"seconds": 10, "mib": 256}``, and an id where an answer is wanted. Every recorder
that watches the folder then writes a file of its own, which bears that id: ``.part`` while it grows, ``.hisparse`` when
it is whole, or ``.failed`` with the reason. Removing or replacing ``record`` ends the recording; what was recorded is
kept.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

FILE = "record"
WHOLE, PART, FAILED = ".hisparse", ".part", ".failed"
MOST_SECONDS = 3600.0  #: a recording nobody ends is over after that
MOST_MIB = 16384.0


class BadRequest(ValueError):
    """What is asked for makes no sense; the text says what would."""


@dataclass(frozen=True)
class Request:
    """A trace that is wanted."""

    seconds: float
    mib: float
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    answered: bool = True
    """Whether somebody waits for the file, and would read why there is none."""

    def __post_init__(self) -> None:
        """Raises `BadRequest`: a limit that is none, or an id that is no part of a file's name."""
        _limited("seconds", self.seconds, MOST_SECONDS)
        _limited("mib", self.mib, MOST_MIB)
        if not (isinstance(self.id, str) and re.fullmatch(r"[0-9a-f]{8}", self.id)):
            raise BadRequest(f"id: {self.id!r} is not eight hexadecimal digits")

    def files(self, folder: Path, ending: str) -> list[Path]:
        """What recorders have written for it."""
        return sorted(folder.glob(f"trace-*-{self.id}-*{ending}"))


def ask(folder: Path, request: Request) -> None:
    """Replace what was asked before, all at once: a recorder never sees half of it."""
    new = folder / f"{FILE}.{request.id}"
    try:
        new.write_text(json.dumps({"seconds": request.seconds, "mib": request.mib, "id": request.id}), "utf-8")
        new.replace(folder / FILE)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    finally:
        new.unlink(missing_ok=True)


def withdraw(folder: Path, request: Request) -> None:
    """End the recording, unless somebody else has asked for another one since."""
    try:
        if asked(folder) == request:
            (folder / FILE).unlink()
    except (OSError, BadRequest):  # gone, or no longer ours
        return


def asked(folder: Path) -> Request:
    """What is asked for.

    Raises:
        BadRequest: it makes no sense.
        OSError: there is no such file.
    """
    with (folder / FILE).open("rb") as file:
        text = file.read(4096)
    try:
        found = json.loads(text)
        given = {"id": found["id"]} if "id" in found else {"answered": False}
        return Request(found["seconds"], found["mib"], **given)
    except BadRequest:
        raise
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadRequest(f'{folder / FILE} should hold {{"seconds": 10, "mib": 256}}') from None


def unusable(folder: Path) -> str | None:
    """Why no trace can be written to this folder, which is made if it is not there; None: one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"


def lock(file: int | IO[bytes], wait: bool = False) -> bool | None:
    """Hold a file or folder until it is closed; False: somebody else has it, None: it cannot be held."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def abandoned(path: Path) -> bool:
    """Whether the writer of this file has ended without finishing it."""
    try:
        opened = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return lock(opened) is True
    finally:
        os.close(opened)


def _limited(name: str, value: object, most: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 < value <= most and math.isfinite(value))
    ):
        raise BadRequest(f"{name}: {value!r} is no number above 0 and up to {most:g}")
