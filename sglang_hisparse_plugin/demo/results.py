"""What a demo has found: in a line, as tables, and as a record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from datetime import datetime, timezone

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__, provenance
from . import cpu
from .progress import line
from .report import Report

REAL = "SGLang's scheduler, batches, HiSparse coordinator, allocators, pools and HTTP server; the model's weights"
ADDED = "a hook that reads the pools' free slots, and one that makes the wrong host rows of the controls"


def verdict(device: str, reports: list[Report]) -> str:
    """The whole result in one line."""
    outcomes = [check.passed for report in reports for check in report.checks]
    made, failed, not_made = (len(outcomes) - outcomes.count(None), outcomes.count(False), outcomes.count(None))
    where = f"SGLang {' and '.join(report.release for report in reports)}, {device}"
    if not all(report.checks for report in reports):
        return f"not every check was made on {where}"
    found = f"{failed} of {made} checks fail" if failed else f"all {made} checks hold"
    return f"{found} on {where}" + (f"; {not_made} not applicable" if not_made else "")


def show(console: Console, device: str, reports: list[Report]) -> None:
    """A table for each release, and what was real."""
    for report in reports:
        table = Table(title=f"SGLang {report.release}, {device}", title_justify="left", show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for check in report.checks:
            outcome = {True: "[green]holds[/]", False: "[bold red]FAILS[/]", None: "[dim]n/a[/]"}[check.passed]
            table.add_row(outcome, Text(check.name), Text(check.detail))
        console.print(table, f"{report.figures['seconds']:.0f} s")
    line(console, f"Real: {REAL}.")
    line(console, f"Added: {ADDED}.")
    if device == "cpu":
        line(console, "Stand-ins, because this is no GPU:")
        for text in cpu.STAND_INS.values():
            line(console, f"- {text}.")
    else:
        line(console, "No stand-ins.")


def record(device: str, tp: int, reports: list[Report]) -> dict[str, object]:
    """For machines, and to be kept."""
    return {
        "device": device,
        "tp": tp,
        **machine(device, tp),
        "real": REAL,
        "added": ADDED,
        "stand_ins": list(cpu.STAND_INS.values()) if device == "cpu" else None,
        "verdict": verdict(device, reports),
        "passed": all(report.passed for report in reports),
        "releases": [{**asdict(report), "passed": report.passed} for report in reports],
    }


def machine(device: str, gpus: int = 1) -> dict[str, object]:
    """Where and with what this ran, for the record."""
    if device == "cuda":
        import torch

        names = [torch.cuda.get_device_name(i) for i in range(gpus)]
        name = names[0] if gpus == 1 else f"{gpus} x {' and '.join(dict.fromkeys(names))}"
    else:
        name = f"{os.cpu_count()} x {platform.machine()}"
    return {
        "hardware": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": provenance.commit(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
