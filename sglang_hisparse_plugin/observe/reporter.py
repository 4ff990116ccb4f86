"""The thread that reads everything every few seconds and tells: metrics, a log line, or both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from .sample import Reader, Sample

logger = logging.getLogger(__name__)

INTERVAL = 5.0  #: seconds between two readings for Prometheus
Publish = Callable[[Sample, Sample], None]


class Reporter:
    """Calls ``publish(sample, earlier)`` every `interval` seconds, from a daemon thread.

    A reading that fails is logged once and tried again: the server must not suffer from being watched.
    """

    def __init__(self, read: Reader, publish: Publish, interval: float) -> None:
        self._read, self._publish, self._interval = read, publish, interval
        self._last = Sample()
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hisparse-report", daemon=True)

    def start(self) -> None:
        """Start the thread; the first reading comes at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def tick(self) -> None:
        """One reading, published."""
        sample = self._read()
        self._publish(sample, self._last)
        self._last = sample

    def _run(self) -> None:
        while True:
            try:
                self.tick()
            except Exception as error:  # a torch or a prometheus that is not as expected
                level = logging.DEBUG if self._failed else logging.WARNING
                logger.log(level, "HiSparse metrics: a reading failed: %s: %s", type(error).__name__, error)
                self._failed = True
            if self._stop.wait(self._interval):
                return


class LogLine:
    """Publishes as log lines: one when nothing happens any more, and then none until something does."""

    def __init__(self) -> None:
        self._last = ""

    def publish(self, sample: Sample, earlier: Sample) -> None:
        """Log what lies between two samples."""
        new = sample.since(earlier)
        line = new.line()
        if new.idle and line == self._last:
            return
        self._last = line
        logger.info("%s", line)
