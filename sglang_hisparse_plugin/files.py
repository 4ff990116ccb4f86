"""Files that a command leaves for its user: whole, or as they were."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

HELD = ("/dev/fd/", "/dev/std", "/proc/")  # what somebody has open


def as_json(value: Any) -> bytes:
    """For a file."""
    return (json.dumps(value, indent=1) + "\n").encode()


def check_writable(file: Path) -> None:
    """Whether `write` would come to its end as far as can be told; nothing is left behind.

    Raises:
        OSError: it would not.
    """
    target = _target(file)
    if not _in_place(file, target):
        with tempfile.TemporaryFile(dir=target.parent):
            pass


def write(file: Path, data: bytes) -> None:
    """Beside `file`, then renamed; a link stays one. In place where nothing can be renamed: a pipe, a device, what
    somebody has open, a file in a folder that is not to be written to.

    Raises:
        OSError: and `file` is as it was, unless it was written in place.
    """
    target = _target(file)
    if _in_place(file, target):
        file.write_bytes(data)
        return
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=".hisparse.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(beside).chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask())
        Path(beside).replace(target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _target(file: Path) -> Path:
    """What is to be written: where links lead."""
    target = Path(os.path.realpath(file))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if file.exists() and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    return target


def _in_place(file: Path, target: Path) -> bool:
    if str(file.absolute()).startswith(HELD) or (file.exists() and not file.is_file()):
        return True
    return target.is_file() and not os.access(target.parent, os.W_OK)


def _umask() -> int:
    """The only way to read it is to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
