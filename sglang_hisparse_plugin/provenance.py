"""What a record of a measurement says of the code and the driver that it was made with. Standard library only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def commit(checkout: Path = CHECKOUT) -> str | None:
    """What is checked out in `checkout`; None where it is not the top of a repository, as site-packages is not."""
    try:
        top, found = _said("git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD").splitlines()
    except ValueError:
        return None
    return found if Path(top).resolve() == checkout else None


def driver() -> str | None:
    """Version of NVIDIA's driver, such as 580.65.06; None where neither nvidia-smi nor the kernel module tells."""
    told = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        told = told or DRIVER_FILE.read_text("utf-8")
    except OSError:
        return None
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", told)
    return version[0] if version else None


def _said(*command: str) -> str:
    """What a program prints; empty where it is missing, fails or hangs."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
