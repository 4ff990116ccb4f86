"""What `table.py` serves, and what it writes down."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import client
from rich.console import Console
from rich.table import Table

from sglang_hisparse_plugin.demo import results
from sglang_hisparse_plugin.demo.weights import Draft


@dataclass(frozen=True)
class Mode:
    """One way to serve."""

    name: str
    hisparse: bool
    draft: Draft | None
    kernel: str | None = None
    """Whose swap-in."""
    beside: str = ""
    """The same without HiSparse."""

    @property
    def label(self) -> str:
        return f"{self.name}-{self.kernel}" if self.kernel else self.name


MODES = (
    Mode("plain", hisparse=False, draft=None),
    Mode("hisparse", hisparse=True, draft=None, kernel="ours", beside="plain"),
    Mode("hisparse", hisparse=True, draft=None, kernel="upstream", beside="plain"),
    Mode("speculative", hisparse=False, draft=Draft.RIGHT),
    # SGLang's kernels know no draft tokens
    Mode("both", hisparse=True, draft=Draft.RIGHT, kernel="ours", beside="speculative"),
)
Load = tuple[int, int]  #: requests at once, tokens of each prompt


@dataclass
class Cell:
    """What one server did with one load, a sample for each turn."""

    tokens_per_s: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    hit_rate: list[float] = field(default_factory=list)

    def row(self, mode: Mode, load: Load) -> dict[str, Any]:
        """For the record: medians, and the lowest and highest. A step is a forward pass of the model."""
        requests, context = load
        accepted = statistics.median(self.acceptance) if self.acceptance else None
        per_token = [1000 * requests / rate for rate in self.tokens_per_s]
        per_step = [ms * (accepted or 1) for ms in per_token]
        return {
            "mode": mode.name,
            "kernel": mode.kernel,
            "concurrency": requests,
            "context": context,
            "samples": len(self.tokens_per_s),
            "tokens_per_s": statistics.median(self.tokens_per_s),
            "tokens_per_s_spread": [min(self.tokens_per_s), max(self.tokens_per_s)],
            "ms_per_token": statistics.median(per_token),
            "ms_per_step": statistics.median(per_step),
            "ms_per_step_spread": [min(per_step), max(per_step)],
            "acceptance": accepted,
            "hit_rate": statistics.median(self.hit_rate) if self.hit_rate else None,
        }


class Server(Protocol):
    """One whose cells are rows."""

    mode: Mode
    cells: dict[Load, Cell]


class Record:
    """All rows, written anew after each turn."""

    def __init__(self, options: argparse.Namespace, release: str) -> None:
        machine = results.machine(options.device)
        commit = options.commit or machine["commit"]
        asked = {name: getattr(options, name) for name in ("steps", "layers", "draft_tokens")}
        self.head = machine | {"commit": commit} | asked
        self.common = {"release": release, "device": machine["hardware"], "commit": commit}
        self.file: Path | None = options.json
        self.failures: list[str] = []
        self.seats: list[Server] = []

    def rows(self) -> list[dict[str, Any]]:
        """A row for each server and load that has a sample."""
        loads = dict.fromkeys(load for seat in self.seats for load in seat.cells)
        return [
            seat.cells[load].row(seat.mode, load) | self.common
            for load in loads
            for seat in self.seats
            if load in seat.cells
        ]

    def costs(self) -> list[dict[str, Any]]:
        """Milliseconds that HiSparse adds to a step, beside the same server without it."""
        by_mode = {(row["mode"], row["kernel"], row["concurrency"], row["context"]): row for row in self.rows()}
        found = []
        for (name, kernel, *load), row in by_mode.items():
            mode = next(mode for mode in MODES if (mode.name, mode.kernel) == (name, kernel))
            without = by_mode.get((mode.beside, None, *load))
            if without:
                names = {key: row[key] for key in ("mode", "kernel", "concurrency", "context")}
                found.append(names | {"ms_per_step": row["ms_per_step"], "without": without["ms_per_step"]})
        return found

    def write(self) -> None:
        """To the file, if there is one."""
        if self.file:
            text = json.dumps(
                self.head | {"rows": self.rows(), "costs": self.costs(), "failures": self.failures}, indent=1
            )
            self.file.write_text(text + "\n")

    def show(self) -> None:
        """Print the rows, what HiSparse costs, and what failed."""
        client.show(self.rows())
        table = Table("mode", "kernel", "requests", "context", "ms/step", "without HiSparse", "more")
        for cost in self.costs():
            ours, without = cost["ms_per_step"], cost["without"]
            sizes = (cost["mode"], cost["kernel"], str(cost["concurrency"]), str(cost["context"]))
            table.add_row(*sizes, f"{ours:.2f}", f"{without:.2f}", f"{ours - without:+.2f}")
        Console().print(table)
        for failure in self.failures:
            print(failure, file=sys.stderr)
