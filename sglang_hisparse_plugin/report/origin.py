"""What figures are of: code, day and machine, in the words of the table, the page and the pictures alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

UNKNOWN = "unknown"
#: How a value is announced, by its key in the record.
LABELS = {
    "plugin": "plugin",
    "commit": "commit",
    "sources": "kernel sources",
    "date": "date",
    "device": "device",
    "driver": "driver",
    "torch": "torch",
    "cuda": "CUDA",
    "timed_after": "each replay follows",
}
DRIFT = 1.02  # a ratio; less is not worth a word
ISO = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[\d:.]*(Z|[+-]\d\d:\d\d|)")  # date, minute, zone


def facts(raw: Mapping[str, Any]) -> dict[str, str]:
    """Whole values by key of LABELS; "unknown" where the record does not say one."""
    said = {key: value for key, value in raw.items() if isinstance(value, (str, int, float)) and str(value).strip()}
    return {key: shown(said.get(key, UNKNOWN)) for key in LABELS}


def sentence(raw: Mapping[str, Any]) -> str:
    """All of them in one line."""
    return _labelled(raw, LABELS)


def title(raw: Mapping[str, Any]) -> str:
    """Device, commit and sources, for the title of a picture."""
    return f"{facts(raw)['device']}, {_labelled(raw, ('commit', 'sources'))}"


def ceilings(raw: Mapping[str, Any]) -> dict[str, str]:
    """GB/s of scattered rows, by their bytes; of a link that drifted also before the grid and after it."""
    return {str(row): f"{rate:.1f}{_drift(raw, str(row))}" for row, rate in raw["scattered_gbps"].items()}


def _drift(raw: Mapping[str, Any], row: str) -> str:
    runs = raw.get("scattered_gbps_runs") or {}
    rates = [
        max(blocks.values())
        for when in ("before", "after")
        for size, blocks in runs.get(when, {}).items()
        if str(size) == row
    ]
    if len(rates) < 2 or max(rates) <= DRIFT * min(rates):
        return ""
    return f" ({rates[0]:.1f} before the grid, {rates[1]:.1f} after it)"


def shown(value: Any) -> str:
    """Four digits of a fraction, and of a time the minute; the JSON has all."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, str) and (time := ISO.fullmatch(value)):
        return f"{time[1]} {time[2]}{' UTC' if time[3] in ('Z', '+00:00') else time[3]}"
    return "-" if value is None else str(value)


def _labelled(raw: Mapping[str, Any], keys: Iterable[str]) -> str:
    found = facts(raw)
    return ", ".join(f"{LABELS[key]} {_short(found[key])}" for key in keys)


def _short(value: str) -> str:
    """Nine digits of a whole commit; what is written behind one, such as -dirty, stays."""
    return re.sub(r"\b([0-9a-f]{9})[0-9a-f]{31}\b", r"\1", value)
