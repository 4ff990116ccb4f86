"""Counts and memory as people write them. Standard library only."""

from __future__ import annotations

import re
from decimal import Decimal

MIB, GIB = 1 << 20, 1 << 30

#: As SGLang reads --context-length and --max-total-tokens (human_readable_int, from 0.5.12).
COUNTS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
#: As SGLang's log counts, in units of 1024, unless decimal bytes are named.
MEMORY = {
    **dict.fromkeys(("M", "MI", "MIB"), MIB),
    **dict.fromkeys(("", "G", "GI", "GIB"), GIB),
    **dict.fromkeys(("T", "TI", "TIB"), 1 << 40),
    **{"MB": 10**6, "GB": 10**9, "TB": 10**12},
}
AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
SHOWN = 40  # characters of what was given


def count(text: str, least: int = 1, most: int = 1 << 40) -> int:
    """A whole number: 65536, 64k (64000), 64Ki (65536), 1M.

    Raises:
        ValueError: it is none, or is not from `least` to `most`; the text says how to write it.
    """
    found = AMOUNT.fullmatch(text.strip())
    if found and found[2] not in COUNTS and found[2].lower() in ("k", "m", "g"):
        small = "k" if found[2].lower() == "k" else found[2].upper()
        raise ValueError(
            f"{text[:SHOWN]!r} can be read in two ways: write {found[1]}{small} ({COUNTS[small]} each) or "
            f"{found[1]}{small.upper()}i ({COUNTS[small.upper() + 'i']}), as SGLang has it"
        )
    number = Decimal(found[1]) * COUNTS[found[2]] if found and found[2] in COUNTS else None
    if number is None or number != int(number) or not least <= number <= most:
        raise ValueError(f"{text[:SHOWN]!r} is no whole number from {least} to {most}")
    return int(number)


def memory(text: str) -> int:
    """Bytes: 139 and 139G are GiB, as in SGLang's log; 141GB, 2TB are decimal.

    Raises:
        ValueError: it is no size; the text says how to write one.
    """
    found = AMOUNT.fullmatch(text.strip())
    if not found or found[2].upper() not in MEMORY:
        raise ValueError(f"{text[:SHOWN]!r} is no size: give GiB, or a number with a unit, such as 139G, 141GB, 2TB")
    return int(Decimal(found[1]) * MEMORY[found[2].upper()])


def round_up(number: int, unit: int) -> int:
    """The smallest multiple of `unit` that is no less."""
    return -(-number // unit) * unit
