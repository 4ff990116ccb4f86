"""Files that a command leaves for its user: whole, or as they were."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def check_writable(file: Path) -> None:
    """Whether `write` would come to its end as far as can be told; nothing is left behind.

    Raises:
        OSError: it would not.
    """
    target = file.resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
    if target.is_file() or not target.exists():
        with tempfile.TemporaryFile(dir=target.parent):
            pass


def write(file: Path, data: bytes) -> None:
    """Beside `file`, then renamed. A link stays one, to what is written; a device or pipe is written to.

    Raises:
        OSError: and `file` is as it was.
    """
    check_writable(file)
    target = file.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(beside).chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask())
        Path(beside).replace(target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The only way to read it is to set it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
