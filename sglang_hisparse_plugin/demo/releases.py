"""SGLang releases as unpacked wheels, kept between runs.

A wheel unpacked into a folder and put on PYTHONPATH is that release: one virtual environment serves them all.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

#: Names a folder with one unpacked wheel per release, used instead of the cache and never written to.
OVERRIDE = "SGLANG_HISPARSE_WHEELS"


class ReleaseUnavailable(RuntimeError):
    """The wheel of a release could not be obtained; the message says why and what to do."""


def cache_dir() -> Path:
    """Where unpacked wheels are kept: `$XDG_CACHE_HOME/sglang-hisparse-plugin/wheels` (default `~/.cache`)."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ReleaseUnavailable("no home folder to keep wheels in; set XDG_CACHE_HOME") from None
    return Path(base) / "sglang-hisparse-plugin" / "wheels"


def canonical(release: str) -> str:
    """The release as an index spells it, for example "0.5.10.post1".

    Raises:
        ReleaseUnavailable: it is no version at all.
    """
    try:
        return str(Version(release))
    except InvalidVersion:
        raise ReleaseUnavailable(f"{release!r} is no release of SGLang; give its version, such as 0.5.12") from None


def fetch(release: str) -> Path:
    """The folder to put on PYTHONPATH for SGLang `release`, downloading its wheel with pip if it is not cached.

    Safe when several processes ask at once: each unpacks apart and renames into place, the first one wins.

    Raises:
        ReleaseUnavailable: `release` is no version, the index has no such wheel or cannot be reached, or the cache
            cannot be written to.
    """
    release = canonical(release)
    given = os.environ.get(OVERRIDE)
    if given and _is_sglang(Path(given) / release):
        return Path(given) / release
    target = cache_dir() / release
    if _is_sglang(target):
        return target
    try:
        _fetch(release, target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ReleaseUnavailable(
            f"cannot keep the wheel of SGLang {release} in {target.parent}: {error}; set XDG_CACHE_HOME to a folder "
            f"with room that can be written to, or {OVERRIDE} to one that holds {release}/sglang"
        ) from error
    return target


def _fetch(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=target.parent) as work:
        unpacked = Path(work) / "unpacked"
        with zipfile.ZipFile(_download(release, Path(work))) as wheel:
            wheel.extractall(unpacked)
        try:
            unpacked.rename(target)
        except OSError:  # another process was first; a folder in place is always complete
            if not _is_sglang(target):
                raise


def _is_sglang(folder: Path) -> bool:
    return (folder / "sglang" / "srt").is_dir()


def _download(release: str, into: Path) -> Path:
    # The version of Python is named because wheels from 0.5.18 on are tagged for it; the Python code in them runs on
    # every version SGLang supports.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--retries=1", "--timeout=20"]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12", f"--dest={into}"]
    command += [f"--platform=manylinux_2_{minor}_{platform.machine()}" for minor in range(39, 16, -1)]
    command += [f"--platform=manylinux2014_{platform.machine()}", f"sglang=={release}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(into.glob("sglang-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "pip said nothing").splitlines()[-1]
        if "connection broken" in done.stderr:  # pip goes on to say that there is no such version
            reason = "the package index cannot be reached"
        raise ReleaseUnavailable(
            f"no wheel of SGLang {release}: {reason}; check the network and pip's index settings, "
            f"or set {OVERRIDE} to a folder that holds {release}/sglang"
        )
    return wheels[0]
