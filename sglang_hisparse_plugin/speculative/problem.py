"""What is wrong with a server that is to speculate."""

from __future__ import annotations

from dataclasses import dataclass


class Unsupported(ValueError):
    """A configuration that cannot be right; the text says why and what to change."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, with its numbers, and what to change."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"
