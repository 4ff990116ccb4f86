"""What every module here raises for input that cannot be reckoned with."""

from __future__ import annotations


class SizingError(ValueError):
    """What was given does not add up; the text names the remedy."""
