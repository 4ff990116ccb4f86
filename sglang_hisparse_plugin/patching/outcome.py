"""What a probe can find and what can become of an overlay. Each carries a sentence for the user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defective:
    """The source has the defect this overlay repairs."""

    evidence: str


@dataclass(frozen=True)
class Fixed:
    """The source already behaves as the overlay would make it."""

    evidence: str


@dataclass(frozen=True)
class Absent:
    """The source has no such feature, so there is nothing to repair."""

    evidence: str


@dataclass(frozen=True)
class Unknown:
    """The source is neither of the shapes the overlay knows."""

    expected: str
    found: str


Verdict = Defective | Fixed | Absent | Unknown


@dataclass(frozen=True)
class Applied:
    """The overlay is (or, in a plan, will be) in place."""

    reason: str


@dataclass(frozen=True)
class Skipped:
    """The overlay is not needed, or the user asked for it to be left out."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The overlay cannot be applied safely: `reason` says what the user loses, `evidence` what was found."""

    reason: str
    evidence: str


Outcome = Applied | Skipped | Refused
