"""Small files of the system, such as those below /proc and /sys, that may be missing, unreadable or no text."""

from __future__ import annotations

from pathlib import Path


def text(path: Path) -> str:
    """What is in a file; empty where it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
