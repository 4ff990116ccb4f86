"""What the state machine still finds with the plugin: open defects. The suite asserts that each is still found."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """An open defect, recognised by its evidence."""

    name: str
    """A row of the defect register."""
    evidence: str
    """A regular expression."""
    releases: tuple[str, ...]
    reason: str


KNOWN: tuple[Known, ...] = ()

PLANTED = {
    "freed-twice": "host rows in two hands",
    "corrupted-row": "are wrong",
    "refused": "fits by itself, and is refused",
}
"""Evidence of each planted bug."""

LEAK, ABORT, SLOTS = "host rows in no hand", "goes on after its abort", "alloc_req_slots runs out of memory"
TWICE = "logical pages in two hands"
LATE, COPY = "writes host rows that are not its own", "NotImplementedError in get_cpu_copy"
UNCHANGED: dict[str, dict[str, tuple[str, ...]]] = {
    "plain": {
        "0.5.10": (LEAK, SLOTS, TWICE),
        "0.5.10.post1": (LEAK, SLOTS, TWICE),
        "0.5.11": (SLOTS,),
        "0.5.12": (ABORT,),
        "0.5.13": ("Error in _eager_backup_previous_token",),
        "0.5.15": (ABORT,),
        "0.5.18": (ABORT,),
        "0.5.20": (ABORT,),
        "0.5.23": (ABORT,),
    },
    "decode-plain": {
        "0.5.10": (LEAK, LATE, COPY),
        "0.5.10.post1": (LEAK, LATE, COPY),
        "0.5.11": (LATE, COPY),
        "0.5.12": (LEAK, LATE, COPY),
        "0.5.13": (LEAK, LATE, COPY),
        "0.5.15": (LEAK, LATE, COPY),
        "0.5.18": (LATE, COPY),
        "0.5.20": (LEAK, LATE, COPY),
        "0.5.23": (COPY,),
    },
}
"""Kinds of evidence that each release shows without the plugin, on pools as large as they can be."""


def classify(release: str, evidence: str) -> str | None:
    """The name of the open defect that evidence belongs to."""
    return next((k.name for k in KNOWN if release in k.releases and re.search(k.evidence, evidence)), None)


def kind(evidence: str) -> str:
    """Evidence without what differs from one sequence to another."""
    if crash := re.match(r"(\w+(?:Error|Exception)): (.*) in (?:.* > )?(\w+) \([^)]*\)$", evidence):
        error, message, where = crash.groups()
        return f"{error} in {where}: {re.sub(r'[0-9]+', 'N', message)[:60]}"
    text = re.sub(r" \(first in iteration \d+\)$", "", evidence)
    text = re.sub(r"\[[^]]*\]( and more)?|\{[^}]*\}", "...", re.sub(r"\br\d+\b", "a request", text))
    return re.sub(r"\d+", "N", text)
