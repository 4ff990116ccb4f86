"""The one table of metrics: source of their registration, of the table in ``docs/operating.md`` and of the dashboard.

``python -m sglang_hisparse_plugin.observe.metrics`` writes the table in the docs and ``examples/dashboard.json`` anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

PREFIX = "sglang:hisparse_"  #: as SGLang's own metrics
ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"


@dataclass(frozen=True)
class Metric:
    """One metric. Its labels come on top of those that SGLang gives its scheduler's metrics."""

    name: str
    """Without `PREFIX`, and for a counter without ``_total``."""
    kind: str
    """counter, gauge or histogram."""
    unit: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full(self) -> str:
        """The name under which it is scraped."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


HITS = Metric("swap_in_hits", "counter", "entries", "Selected tokens that were on the device already.", ("layers",))
MISSES = Metric("swap_in_misses", "counter", "rows", "Selected tokens copied from host memory.", ("layers",))
BYTES = Metric("swap_in_bytes", "counter", "bytes", "Bytes copied from host memory.", ("layers",))
MISSES_PER_CALL = Metric(
    "swap_in_misses_per_call", "histogram", "rows", "Misses of one request in one step of one layer."
)
HIT_RATE = Metric(
    "swap_in_hit_rate",
    "gauge",
    "0 to 1",
    "Hits per selected token in the last five seconds; NaN if none was selected. For other spans use the counters.",
)
POOL_USED = Metric("pool_used_slots", "gauge", "slots", "Slots in use of a pool: device, host or logical.", ("pool",))
POOL_SIZE = Metric("pool_slots", "gauge", "slots", "Slots of a pool: device, host or logical.", ("pool",))
STAGING = Metric("staging_queue_reqs", "gauge", "requests", "Requests whose prompt is on its way to host memory.")
RETRACTIONS = Metric(
    "retractions", "counter", "requests", "Requests retracted, by where they were: running or staging.", ("stage",)
)
REFUSED = Metric(
    "refused_admissions",
    "counter",
    "requests",
    "Requests that the scheduler refused before they ran; the HTTP side's refusals are in sglang:http_responses_total.",
    ("reason",),
)
QUEUE_FULL = "queue_full"  #: reason of `REFUSED`
#: Reasons of it, too: the pool in which a server that does nothing else has no room for the request.
TOO_SMALL = {pool: f"{pool}_pool_too_small" for pool in ("device", "host", "logical")}
ABORTS = Metric("aborts", "counter", "requests", "Requests aborted, in the waiting queue or later.", ("reason",))
OVERLAY = Metric("overlay_info", "gauge", "1", "What became of an overlay of the plugin.", ("overlay", "outcome"))

METRICS = (
    *(HITS, MISSES, BYTES, MISSES_PER_CALL, HIT_RATE, POOL_USED, POOL_SIZE, STAGING),
    *(RETRACTIONS, REFUSED, ABORTS, OVERLAY),
)


def table() -> str:
    """The table of ``docs/operating.md``."""
    rows = ["| metric | type | unit | own labels | meaning |", "|---|---|---|---|---|"]
    rows += [f"| `{m.full}` | {m.kind} | {m.unit} | {', '.join(m.labels) or '-'} | {m.help} |" for m in METRICS]
    return "\n".join(rows) + "\n"


def documents(root: Path = ROOT) -> dict[Path, str]:
    """The text of each file that is written from the table.

    Raises:
        ValueError: the docs have no place for it.
    """
    from .dashboard import dashboard

    page = root / "docs" / "operating.md"
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}, between which the metrics go")
    return {
        page: f"{before}{BEGIN}\n{table()}{END}{after}",
        root / "examples" / "dashboard.json": json.dumps(dashboard(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for file, text in documents().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
        print(file.relative_to(ROOT), file=sys.stderr)
