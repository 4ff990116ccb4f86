"""Text for a terminal: as wide as it is, 80 columns where nobody says."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

NARROWEST, WIDEST = 40, 140


def width() -> int:
    """Columns that text may take."""
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))


def fill(text: str, indent: str = "") -> str:
    """`text` in lines of that width, the second and later ones indented; words, such as paths, stay whole."""
    return textwrap.fill(
        " ".join(text.split()), width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def complain(command: str, text: str, out: TextIO | None = None) -> None:
    """What is wrong, on stderr; to nobody where that is closed."""
    if stream := out or sys.stderr:
        print(fill(f"sglang-hisparse {command}: {text}", "  "), file=stream)


def command(flags: list[str], indent: str = "  ") -> list[str]:
    """Flags with their values as lines to paste into a shell, each continued but the last.

    A flag is parted from its value only where both together are wider than a line, and a value is never broken.
    """
    rows: list[str] = []
    for flag in flags:
        pieces = [flag] if len(indent) + len(flag) + 2 <= width() else flag.split(" ", 1)
        for number, piece in enumerate(pieces):
            if rows and len(rows[-1]) + 1 + len(piece) + 2 <= width():
                rows[-1] += f" {piece}"
            else:
                deep = number and 2 * len(indent) + len(piece) + 2 <= width()
                rows.append((2 if deep else 1) * indent + piece)
    return [f"{row} \\" for row in rows[:-1]] + rows[-1:]
