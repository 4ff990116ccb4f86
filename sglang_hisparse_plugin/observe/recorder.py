"""The thread that waits for a request (`request.py`) and writes the ring's rows into a file."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO, Any

from . import request
from .request import BadRequest, Request
from .ring import Ring, Tap
from .tracefile import gap, header

logger = logging.getLogger(__name__)

TICK = 0.25  # seconds between two looks at whether a trace is asked for
DRAIN = 0.05  # seconds between two looks at the ring while it fills
STALE = 60.0  # seconds after which a file that nobody holds belongs to nobody

Stamp = tuple[int, int] | None


class NothingRecorded(RuntimeError):
    """The server was idle."""


class Recorder:
    """Writes a file for each request. A full disk ends the recording, not the server.

    Args:
        about: what else the file's header says, beside what the ring knows.
    """

    def __init__(self, ring: Ring, folder: Path, about: dict[str, Any]) -> None:
        self.ring, self.folder = ring, folder
        self._tap = Tap(ring)
        self._header = header({**about, "top_k": ring.top_k, "layers": ring.layers})
        self._seen = self._stamp()  # what was asked before the server started is over
        self._thread = threading.Thread(target=self._run, name="hisparse-trace", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _stamp(self) -> Stamp:
        """Tells one request file from the next; None: there is none."""
        try:
            found = (self.folder / request.FILE).stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ino) if found.st_size else None

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            stamp = self._stamp()
            if stamp in (None, self._seen):
                continue
            self._seen = stamp
            try:
                wanted = request.asked(self.folder)
            except (BadRequest, OSError) as error:
                logger.warning("HiSparse trace: nothing recorded: %s", error)
                continue
            try:
                self.record(wanted)
            except Exception as error:  # disk full, folder gone, no number: the server goes on
                logger.warning("HiSparse trace: nothing recorded: %s: %s", type(error).__name__, error)
                self._tell(wanted, str(error))

    def record(self, wanted: Request) -> Path:
        """Record until a limit is reached, or what was asked for last is no longer asked for; returns the file.

        Raises:
            OSError: the file cannot be written; what was written of it is removed.
            NothingRecorded: nothing was selected meanwhile; there is no file.
            BadRequest: no row fits into the size that is asked for.
        """
        self._tidy(wanted)
        part = self._file(wanted, request.PART)
        target = part.with_suffix(request.WHOLE)
        file = part.open("xb")
        try:
            with file:
                request.lock(file, wait=True)
                kept, lost = self._drain(file, wanted)
                file.flush()
                part.rename(target)
        except BaseException as error:
            part.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                raise OSError(error.errno, error.strerror, str(self.folder)) from error
            raise
        finally:
            self._tap.arm(False)
        logger.info("HiSparse trace: %s rows in %s, %s lost", kept, target, lost)
        return target

    def _drain(self, file: IO[bytes], wanted: Request) -> tuple[int, int]:
        """Write rows as they come; returns how many were kept and how many overwritten before they were read."""
        file.write(self._header)
        row_bytes = 4 * self.ring.width
        left = (int(wanted.mib * (1 << 20)) - len(self._header)) // row_bytes
        if left < 1:
            raise BadRequest(f"mib: {wanted.mib:g} has no room for one row of {row_bytes} bytes")
        until = time.monotonic() + wanted.seconds
        done = self._tap.written()
        kept = lost = 0
        going = True
        self._tap.arm(True)
        while going and left > 0:
            time.sleep(DRAIN)
            going = time.monotonic() < until and self._stamp() == self._seen
            if not going:
                self._tap.arm(False)
            end = self._tap.written()
            for missing, rows in self._tap.rows(done, end):
                if missing:
                    lost += missing
                    file.write(gap(missing, self.ring.top_k))
                    left -= 1
                new = rows[: max(0, left)]
                file.write(new.numpy().tobytes())
                kept += new.size(0)
                left -= new.size(0)
                if left <= 0:
                    break
            done = end
        if not kept:
            raise NothingRecorded("nothing was decoded while it was recorded")
        return kept, lost

    def _tell(self, wanted: Request, why: str) -> None:
        """Leave the reason where whoever waits for the file looks for it."""
        if not wanted.answered:
            return
        try:
            self._file(wanted, request.FAILED).write_text(why, "utf-8")
        except OSError:  # an empty file says as much: it could not be written
            return

    def _tidy(self, wanted: Request) -> None:
        """Remove what nobody waits for, and what servers that were killed have left."""
        for old in self.folder.glob(f"trace-*{request.FAILED}"):
            if old not in wanted.files(self.folder, request.FAILED):
                with contextlib.suppress(OSError):
                    old.unlink()
        for part in self.folder.glob(f"trace-*{request.PART}"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > STALE and request.abandoned(part):
                    part.unlink()
                    logger.info("HiSparse trace: %s, of a server that ended while it recorded, was removed", part)

    def _file(self, wanted: Request, ending: str) -> Path:
        return self.folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{wanted.id}-{os.getpid()}{ending}"
