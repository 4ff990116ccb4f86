"""What is switched on by what, once a process: before the scheduler is built, and after.

| asked for by | counters | thread tells | trace ring |
|---|---|---|---|
| `--enable-metrics` | yes | Prometheus, every 5 s | |
| `--hisparse-plugin-log-interval N` | yes | a log line, every N s | |
| `--hisparse-plugin-trace DIR` | | | yes |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .. import upstream
from ..config import Config
from .reporter import INTERVAL, LogLine, Reporter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What is to be observed in this process."""

    settings: Config
    metrics: bool

    @property
    def counts(self) -> bool:
        """Whether anybody reads the swap-in's counters."""
        return self.metrics or self.settings.log_interval > 0


_wanted: dict[str, Wanted] = {}  # under "now", from `prepare` on
_running: list[Any] = []  # reporters and the recorder


def prepare(server_args: Any, settings: Config, first: bool = True) -> None:
    """Before the scheduler is built: coordinators built from now on are counted and recorded if asked for.

    Args:
        first: whether this is tensor-parallel rank 0; the others write no log line and no trace.
    """
    mine = settings if first else replace(settings, log_interval=0.0, trace_dir="")
    _wanted["now"] = Wanted(mine, bool(getattr(server_args, "enable_metrics", False)))


def attach(coordinator: Any) -> None:
    """A coordinator has been built, before any CUDA graph: give it counters and a trace ring, if they are wanted."""
    _if_wanted(_attach, coordinator)


def start(scheduler: Any, outcomes: dict[str, str]) -> None:
    """After the scheduler is built, graphs included: start telling.

    Args:
        outcomes: what became of each overlay, by id.
    """
    _if_wanted(_start, scheduler, outcomes)


def counters_for(call: dict[str, Any]) -> Any:
    """The counters for a swap-in with these arguments, None for none; the call is recorded if traces are wanted."""
    return _if_wanted(_counters_for, call)


def forget(slot: int) -> None:
    """The request in this slot gives it up: a trace tells the next one from it."""
    _if_wanted(_forget, slot)


def _if_wanted(work: Callable[..., Any], *args: Any) -> Any:
    """Do it, if anything is to be observed. What goes wrong ends the observation, never the server."""
    wanted = _wanted.get("now")
    if wanted is None:
        return None
    try:
        return work(wanted, *args)
    except Exception as error:  # a coordinator of another make, a prometheus that is not as expected
        logger.warning("HiSparse: nothing is counted or recorded: %s: %s", type(error).__name__, error)
        clear()
        return None


def _attach(wanted: Wanted, coordinator: Any) -> None:
    if wanted.counts:
        from . import counters

        counters.attach(coordinator.lru_slots)
    if wanted.settings.trace_dir:
        from . import trace

        trace.attach(coordinator, wanted.settings)


def _start(wanted: Wanted, scheduler: Any, outcomes: dict[str, str]) -> None:
    if scheduler.hisparse_coordinator is None:
        if wanted.settings.observes:
            logger.warning("HiSparse: this scheduler decodes without it; there is neither a log line nor a trace")
        return
    if wanted.counts:
        from .reading import reader

        read = reader(scheduler)
        if (labels := upstream.metric_labels(scheduler)) is not None:
            from .exporter import Exporter

            _run(Reporter(read, Exporter(labels, outcomes).publish, INTERVAL))
        if wanted.settings.log_interval:
            _run(Reporter(read, LogLine().publish, wanted.settings.log_interval))
    if wanted.settings.trace_dir:
        from . import trace

        recorder = trace.recorder()
        if recorder is not None:
            _run(recorder)


def _counters_for(wanted: Wanted, call: dict[str, Any]) -> Any:
    if wanted.settings.trace_dir:
        from . import trace

        trace.record(call)
    if not wanted.counts:
        return None
    from . import counters

    return counters.row_for(call["lru_slots"])


def _forget(wanted: Wanted, slot: int) -> None:
    if wanted.settings.trace_dir:
        from . import trace

        trace.forget(slot)


def _run(thread: Any) -> None:
    _running.append(thread)
    thread.start()


def clear() -> None:
    """Ask for nothing any more. Threads that run go on."""
    _wanted.clear()
