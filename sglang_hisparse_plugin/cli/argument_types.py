"""What argparse makes of words; errors say how to write them. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..sizing import amounts
from ..sizing.shapes import MOST_TOKENS


def count(least: int = 1, most: int = 1 << 40) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            return amounts.count(text, least, most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def any_memory(text: str) -> int:
    """Bytes, none included."""
    try:
        return amounts.memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def some_memory(text: str) -> int:
    """Bytes, at least one."""
    if not (size := any_memory(text)):
        raise argparse.ArgumentTypeError("must be more than 0")
    return size


def draft_tokens(text: str) -> int:
    """0 without speculation, else 2 or more."""
    if (number := count(0, MOST_TOKENS)(text)) == 1:
        raise argparse.ArgumentTypeError("1 is no speculation: give 2 or more, as --speculative-num-draft-tokens")
    return number


def rates(text: str) -> tuple[float, ...]:
    """Hit rates."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give hit rates between 0 and 1, separated by commas")
    return found


def seconds(text: str) -> float:
    """A time that ends."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds")
    return value
