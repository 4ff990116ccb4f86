"""The metrics on SGLang's own endpoint: registered as SGLang's collector registers its own, in the same process.

SGLang runs prometheus_client in multiprocess mode: the scheduler's values lie in files of its directory, and the HTTP
process adds them up. So counters and histograms are added to, and gauges say "mostrecent".
"""

from __future__ import annotations

import math
from typing import Any

from .. import upstream
from ..kernels.counters import COPIES, MISS_BUCKETS
from . import metrics
from .sample import Sample


class Exporter:
    """Registers every metric of the table and keeps them up to date.

    Args:
        labels: those of SGLang's own scheduler metrics, with their values.
        outcomes: what became of each overlay: "applied", "skipped" or "refused" by id.
        registry: of prometheus_client; None for its default one, which SGLang uses.
    """

    def __init__(self, labels: dict[str, Any], outcomes: dict[str, str], registry: Any = None) -> None:
        self._labels = labels
        self._metrics = {metric: _register(metric, [*labels, *metric.labels], registry) for metric in metrics.METRICS}
        for overlay, outcome in outcomes.items():
            self._of(metrics.OVERLAY, overlay=overlay, outcome=outcome).set(1)
        for metric, value in _ZEROES:  # a counter that is there before it moves can be asked for its rate
            self._of(metric, **{metric.labels[0]: value}).inc(0)

    def publish(self, sample: Sample, earlier: Sample) -> None:
        """Add what lies between two samples."""
        new = sample.since(earlier)
        for group, (hits, misses, size) in new.by_group().items():
            for metric, n in ((metrics.HITS, hits), (metrics.MISSES, misses), (metrics.BYTES, size)):
                self._of(metric, layers=group).inc(n)
        self._of(metrics.MISSES_PER_CALL).add(new.misses_per_call, new.total(COPIES))
        rate = new.hit_rate
        self._of(metrics.HIT_RATE).set(math.nan if rate is None else rate)
        for pool, (used, size) in sample.pools.items():
            self._of(metrics.POOL_USED, pool=pool).set(used)
            self._of(metrics.POOL_SIZE, pool=pool).set(size)
        self._of(metrics.STAGING).set(sample.staging)
        for (metric, value), n in new.events.items():
            self._of(metric, **{metric.labels[0]: value}).inc(n)

    def _of(self, metric: metrics.Metric, **own: str) -> Any:
        return self._metrics[metric].labels(**self._labels, **own)


_ZEROES = (
    *((metrics.RETRACTIONS, stage) for stage in ("running", "staging")),
    (metrics.ABORTS, upstream.CLIENT),
    *((metrics.REFUSED, reason) for reason in (upstream.BAD_REQUEST, metrics.QUEUE_FULL, *metrics.TOO_SMALL.values())),
)


def _register(metric: metrics.Metric, labels: list[str], registry: Any) -> Any:
    import prometheus_client as client

    where: dict[str, Any] = {"registry": registry or client.REGISTRY}
    name, text = metrics.PREFIX + metric.name, f"{metric.help} Unit: {metric.unit}."
    if metric.kind == "counter":
        return client.Counter(name, text, labels, **where)
    if metric.kind == "gauge":
        return client.Gauge(name, text, labels, multiprocess_mode="mostrecent", **where)
    bounds = [float("inf") if bound is None else bound for bound in MISS_BUCKETS]
    return _histogram()(name, text, labels, buckets=bounds, **where)


def _histogram() -> Any:
    import prometheus_client as client

    class Counted(client.Histogram):
        """A histogram of observations that somebody else has put into its buckets."""

        def add(self, counts: list[int], total: float) -> None:
            """Add `counts` observations, one number per bucket and not cumulative, whose sum is `total`."""
            for bucket, n in zip(self._buckets, counts, strict=True):
                bucket.inc(n)
            self._sum.inc(total)

    return Counted
