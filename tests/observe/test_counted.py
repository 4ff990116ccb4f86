"""From the swap-in's call to numbers: which row counts which layer, what a sample says, what Prometheus gets."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import torch

from sglang_hisparse_plugin import memory, upstream
from sglang_hisparse_plugin.config import Config
from sglang_hisparse_plugin.kernels.counters import BYTES, COPIES, COUNTERS, HITS, MISSES, REQUESTS
from sglang_hisparse_plugin.observe import counters, events, metrics, start, trace
from sglang_hisparse_plugin.observe.exporter import Exporter
from sglang_hisparse_plugin.observe.reporter import LogLine, Reporter
from sglang_hisparse_plugin.observe.sample import Sample, groups
from sglang_hisparse_plugin.overlays import admission_memory
from sglang_hisparse_plugin.overlays import observe as observed
from sglang_hisparse_plugin.overlays import swap_in as overlay

LABELS = {"model_name": "m", "tp_rank": 0}


def slots(layers: int = 3) -> torch.Tensor:
    return torch.arange(8, dtype=torch.int16).repeat(layers, 4, 1)


def one_call(lru: torch.Tensor, layer: int) -> None:
    """One request of 30 tokens with a hot buffer of 8: the newest token hits, one of the buffer hits, two miss."""
    width = 10
    overlay.swap_in(
        lambda **_: pytest.fail("SGLang's kernel was called"),
        top_k_tokens=torch.tensor([[29, 3, 20, 21]], dtype=torch.int32),
        device_buffer_tokens=torch.arange(width, dtype=torch.int32).repeat(4, 1),
        host_cache_locs=torch.arange(4 * 40).view(4, 40),
        device_buffer_locs=torch.arange(4 * width, dtype=torch.int32).view(4, width),
        host_cache=torch.zeros(160, 5, dtype=torch.uint8),
        device_buffer=torch.zeros(40, 5, dtype=torch.uint8),
        top_k_device_locs=torch.zeros(1, 4, dtype=torch.int32),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([30]),
        lru_slots=lru[layer],
        item_size_bytes=5,
        num_top_k=4,
        hot_buffer_size=8,
        num_real_reqs=torch.tensor([1], dtype=torch.int32),
    )


def row(hits: int, misses: int, size: int, requests: int, bucket: int) -> list[int]:
    numbers = [0] * COUNTERS
    numbers[HITS], numbers[COPIES], numbers[BYTES], numbers[REQUESTS] = hits, misses, size, requests
    numbers[MISSES + bucket] += requests
    return numbers


def test_a_call_is_counted_in_the_row_of_its_layer() -> None:
    start.prepare(SimpleNamespace(enable_metrics=True), Config())
    lru = slots()
    start.attach(SimpleNamespace(lru_slots=lru))
    one_call(lru, 2)
    [counted] = counters.attached()
    assert counted.read() == [[0] * COUNTERS, [0] * COUNTERS, row(2, 2, 10, 1, 2)]
    one_call(slots(), 0)  # another coordinator's tables
    assert counted.read()[0] == [0] * COUNTERS


def test_what_was_told_is_not_taken_back() -> None:
    """A call that is still running has its misses among its hits."""
    counted = counters.attach(slots())
    counted.row(1)[HITS], counted.row(1)[MISSES] = 4, 1
    assert counted.read()[1] == row(4, 0, 0, 0, 0)[:MISSES] + [1] + [0] * 13
    counted.row(1)[:] = torch.tensor(row(2, 2, 10, 1, 2))
    assert counted.read()[1][:MISSES] == [4, 2, 10, 1]
    counted.row(1)[HITS] += 3
    assert counted.read()[1][HITS] == 5


def test_the_row_of_a_layer_never_moves() -> None:
    counted = counters.attach(lru := slots())
    first = [counters.row_for(lru[layer]) for layer in range(3)]
    again = [counters.row_for(lru[layer]) for layer in range(3)]
    assert [a.data_ptr() for a in first if a is not None] == [counted.row(i).data_ptr() for i in range(3)]
    assert [a.data_ptr() for a in first if a is not None] == [a.data_ptr() for a in again if a is not None]


def test_nothing_exists_when_nothing_is_asked_for() -> None:
    before, registered = threading.active_count(), len(list(prometheus_client.REGISTRY.collect()))
    start.prepare(SimpleNamespace(enable_metrics=False), Config())
    lru = slots()
    start.attach(SimpleNamespace(lru_slots=lru))
    one_call(lru, 0)
    start.start(SimpleNamespace(hisparse_coordinator=object()), {})
    assert counters.attached() == []
    assert start.counters_for({"lru_slots": lru[0]}) is None
    assert threading.active_count() == before
    assert len(list(prometheus_client.REGISTRY.collect())) == registered


def test_what_goes_wrong_ends_the_observation_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A coordinator, scheduler, call or prometheus of another make than expected."""
    lru = slots()
    coordinator = SimpleNamespace(lru_slots=lru, top_k=4, item_size_bytes=5)
    scheduler = SimpleNamespace(hisparse_coordinator=coordinator)
    for wrong, says in (
        (lambda: start.attach(SimpleNamespace()), "no attribute 'lru_slots'"),
        (lambda: start.start(scheduler, {}), "no attribute 'token_to_kv_pool_allocator'"),
        (lambda: start.counters_for({"lru_slots": lru[0]}), "'NoneType' object has no attribute"),
        (lambda: start.forget(99), "out of bounds"),
    ):
        start.prepare(SimpleNamespace(enable_metrics=True), Config(trace_dir=str(tmp_path)))
        start.attach(coordinator)
        wrong()
        [record] = caplog.records
        assert "nothing is counted or recorded: " in record.message and says in record.message
        assert start.counters_for({"lru_slots": lru[0]}) is None
        caplog.clear()


def test_other_ranks_write_no_log_line_and_have_no_ring(tmp_path: Path) -> None:
    settings = Config(trace_dir=str(tmp_path), log_interval=5)
    coordinator = SimpleNamespace(lru_slots=slots(), top_k=4, item_size_bytes=5)
    start.prepare(SimpleNamespace(enable_metrics=False), settings, first=False)
    start.attach(coordinator)
    assert counters.attached() == [] and trace.recorder() is None
    start.prepare(SimpleNamespace(enable_metrics=True), settings, first=False)
    start.attach(coordinator)
    assert len(counters.attached()) == 1 and trace.recorder() is None


def test_a_scheduler_without_hisparse_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one that prefills for others."""
    start.prepare(SimpleNamespace(enable_metrics=False), Config(log_interval=5))
    start.start(SimpleNamespace(hisparse_coordinator=None), {})
    assert [record.message for record in caplog.records] == [
        "HiSparse: this scheduler decodes without it; there is neither a log line nor a trace"
    ]


def exported(earlier: Sample, *samples: Sample) -> dict[str, float]:
    registry = prometheus_client.CollectorRegistry()
    exporter = Exporter(LABELS, {"swap-in": "applied"}, registry)
    for sample in samples:
        exporter.publish(sample, earlier)
        earlier = sample
    found = {}
    for family in registry.collect():
        for s in family.samples:
            own = {k: v for k, v in s.labels.items() if k not in LABELS}
            assert s.labels["model_name"] == "m" and s.labels["tp_rank"] == "0"
            found[f"{s.name}{sorted(own.items()) if own else ''}"] = s.value
    return found


FIRST = Sample([row(5, 3, 30, 2, 2)], {"host": (4, 10)}, 2, {(metrics.RETRACTIONS, "running"): 1})
SECOND = Sample(
    [[a + b for a, b in zip(FIRST.counts[0], row(1, 9, 90, 1, 4), strict=True)]],
    {"host": (6, 10)},
    0,
    {(metrics.RETRACTIONS, "running"): 3, (metrics.ABORTS, "client"): 1},
)


def test_prometheus_gets_totals_and_the_rate_of_the_last_interval() -> None:
    found = exported(Sample(), FIRST, SECOND)
    p = "sglang:hisparse_"
    assert found[f"{p}swap_in_hits_total[('layers', '0')]"] == 6
    assert found[f"{p}swap_in_misses_total[('layers', '0')]"] == 12
    assert found[f"{p}swap_in_bytes_total[('layers', '0')]"] == 120
    assert found[f"{p}swap_in_hit_rate"] == pytest.approx(0.1)
    assert found[f"{p}swap_in_misses_per_call_bucket[('le', '1.0')]"] == 0
    assert found[f"{p}swap_in_misses_per_call_bucket[('le', '3.0')]"] == 2
    assert found[f"{p}swap_in_misses_per_call_bucket[('le', '7.0')]"] == 2
    assert found[f"{p}swap_in_misses_per_call_bucket[('le', '15.0')]"] == 3
    assert found[f"{p}swap_in_misses_per_call_count"] == 3
    assert found[f"{p}swap_in_misses_per_call_sum"] == 12
    assert found[f"{p}pool_used_slots[('pool', 'host')]"] == 6
    assert found[f"{p}staging_queue_reqs"] == 0
    assert found[f"{p}retractions_total[('stage', 'running')]"] == 3
    assert found[f"{p}aborts_total[('reason', 'client')]"] == 1
    assert found[f"{p}overlay_info[('outcome', 'applied'), ('overlay', 'swap-in')]"] == 1


def test_the_hit_rate_of_an_idle_server_is_no_number() -> None:
    name = "sglang:hisparse_swap_in_hit_rate"
    assert math.isnan(exported(Sample(), Sample([[0] * COUNTERS]))[name])
    assert math.isnan(exported(Sample(), FIRST, SECOND, SECOND)[name])
    assert exported(Sample(), FIRST, SECOND, SECOND)["sglang:hisparse_swap_in_hits_total[('layers', '0')]"] == 6


def test_counters_are_there_before_they_move() -> None:
    """Prometheus knows no rate of what appeared a moment ago."""
    found = exported(Sample())
    for name, value in (
        ("retractions_total", ("stage", "running")),
        ("retractions_total", ("stage", "staging")),
        ("aborts_total", ("reason", "client")),
        ("refused_admissions_total", ("reason", "BadRequestError")),
        ("refused_admissions_total", ("reason", "queue_full")),
        *(("refused_admissions_total", ("reason", f"{pool}_pool_too_small")) for pool in ("device", "host", "logical")),
    ):
        assert found[f"sglang:hisparse_{name}[{value}]"] == 0


def test_every_metric_of_the_table_is_exported_under_its_name() -> None:
    sample = Sample(FIRST.counts, FIRST.pools, 1, {(metrics.REFUSED, "BadRequestError"): 1})
    names = {name.partition("[")[0] for name in exported(Sample(), sample)}
    assert {m.full for m in metrics.METRICS if m.kind != "histogram"} <= names


def test_neighbouring_layers_are_grouped() -> None:
    assert groups(0) == []
    assert groups(2) == [(0, 1), (1, 2)]
    assert [*Sample([row(1, 1, 1, 1, 1)] * 61).by_group()] == [
        *("0-6", "7-14", "15-21", "22-29", "30-37", "38-44", "45-52", "53-60")
    ]


def test_the_log_line() -> None:
    text = SECOND.since(FIRST).line()
    assert "hit rate 10.00%, 9.0 misses per request and layer, 0.0 MB" in text
    assert "host 6/10; 0 staging, retractions (running) 2, aborts (client) 1" in text


def test_an_idle_server_logs_one_line_and_then_none_until_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    busy, full = replace(SECOND, events=FIRST.events), replace(SECOND, pools={"host": (9, 10)}, events=FIRST.events)
    late = replace(full, events={**FIRST.events, (metrics.ABORTS, "client"): 1})
    samples = [FIRST, busy, busy, busy, busy, full, full, full, late, late, late, FIRST]
    earlier, tell = Sample(), LogLine()
    said = []
    for sample in samples[:-1]:
        caplog.clear()
        tell.publish(sample, earlier)
        earlier = sample
        said.append([record.message for record in caplog.records])
    assert [len(lines) for lines in said] == [1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0]
    assert said[2] == ["HiSparse: no swap-in; pools host 6/10; 0 staging; the next line when something changes"]
    assert said[8] == ["HiSparse: no swap-in; pools host 9/10; 0 staging, aborts (client) 1"]


def test_a_server_that_swaps_in_the_same_all_the_time_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tell, twice = LogLine(), Sample([[2 * n for n in FIRST.counts[0]]], FIRST.pools, 2, FIRST.events)
    tell.publish(replace(FIRST, events={}), Sample())
    tell.publish(replace(twice, events={}), replace(FIRST, events={}))
    assert len({record.message for record in caplog.records}) == 1 and len(caplog.records) == 2


class Scheduler:
    """One whose queue of one request is full."""

    hisparse_coordinator: object | None = object()

    def __init__(self) -> None:
        self.waiting_queue = [SimpleNamespace(priority=1)]

    def _abort_on_queued_limit(self, req: SimpleNamespace) -> bool:
        if req.priority > 1:
            self.waiting_queue.pop()
        return req.priority <= 1


@pytest.mark.parametrize(
    ("req", "counted"),
    [
        (SimpleNamespace(priority=0), 1),
        (SimpleNamespace(priority=2), 1),  # the one that waited goes
        (SimpleNamespace(priority=0, hisparse_counted=True), 0),  # counted when fault was found with it
    ],
)
def test_who_is_turned_away_by_a_full_queue_is_counted_once(req: SimpleNamespace, counted: int) -> None:
    scheduler = Scheduler()
    observed.abort_on_queued_limit(Scheduler._abort_on_queued_limit, scheduler, req)
    assert events.read().get((metrics.REFUSED, "queue_full"), 0) == counted
    scheduler = Scheduler()
    scheduler.hisparse_coordinator = None
    observed.abort_on_queued_limit(Scheduler._abort_on_queued_limit, scheduler, req)
    assert events.read().get((metrics.REFUSED, "queue_full"), 0) == counted


@pytest.mark.parametrize("told", [False, True])
def test_an_abort_in_prefill_is_counted_once(told: bool) -> None:
    """From 0.5.22 on the coordinator is told of it, too."""

    class FINISH_ABORT:  # as SGLang calls it
        err_type = None

    def request(reason: object) -> SimpleNamespace:
        return SimpleNamespace(finished_reason=reason, req_pool_idx=None, finished=lambda: reason is not None)

    aborted = request(FINISH_ABORT())
    batch = SimpleNamespace(
        reqs=[aborted, request(None), request(object())], forward_mode=SimpleNamespace(is_extend=lambda: True)
    )

    def within(*_: object) -> None:
        if told:
            observed.request_finished(lambda *_: None, object(), aborted)

    observed.process_batch_result(within, SimpleNamespace(hisparse_coordinator=object()), batch, object())
    assert events.read() == {(metrics.ABORTS, "client"): 1}


def test_a_request_that_can_never_be_served_is_counted_by_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever becomes of it later; and not while somebody could make room."""
    told: list[str] = []
    monkeypatch.setattr(upstream, "refuse", lambda scheduler, req, message: told.append(message))
    monkeypatch.setattr(upstream, "pass_in_flight", lambda scheduler: False)
    monkeypatch.setattr(memory, "too_small", lambda coordinator, names: " and ".join(names))
    req = SimpleNamespace()

    def a_pass(holders: list[object]) -> None:
        ended = SimpleNamespace(holders=holders, admitted=0, refused=(req, ["host", "logical"]))
        monkeypatch.setattr(admission_memory, "Admission", lambda *_: ended)
        scheduler = SimpleNamespace(
            hisparse_coordinator=object(), running_batch=None, token_to_kv_pool_allocator=SimpleNamespace()
        )
        admission_memory.get_new_batch_prefill(lambda *_: None, scheduler)

    a_pass(["somebody"])
    assert not told and not events.read()
    a_pass([])
    assert told == ["The request can never be served. host and logical"]
    assert events.read() == {(metrics.REFUSED, "host_pool_too_small"): 1}
    events.count_once(metrics.ABORTS, req, "InternalServerError")
    assert events.read() == {(metrics.REFUSED, "host_pool_too_small"): 1}


def test_an_abort_in_staging_is_an_abort_and_no_retraction() -> None:
    """As overlay `staging-abort` does it, which lies within."""
    req = SimpleNamespace(req_pool_idx=3, hisparse_staging=True, finished=lambda: False)
    coordinator = SimpleNamespace(ack_staging_queue=[req, "other"])
    scheduler = SimpleNamespace(waiting_queue=["first", "second"], hisparse_coordinator=coordinator)

    def within(scheduler: SimpleNamespace, recv_req: object) -> None:
        observed.retract_req(lambda *_: coordinator.ack_staging_queue.remove(req), coordinator, req)
        scheduler.waiting_queue = ["second"]  # "first" was meant, too

    observed.abort_request(within, scheduler, object())
    assert events.read() == {(metrics.ABORTS, "client"): 2}
    observed.retract_req(lambda *_: None, coordinator, req)
    assert events.read()[metrics.RETRACTIONS, "staging"] == 1


def test_a_failing_reading_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    readings = iter([RuntimeError("gone"), RuntimeError("gone"), FIRST])
    seen, done = [], threading.Event()

    def read() -> Sample:
        what = next(readings, FIRST)
        if isinstance(what, Exception):
            raise what
        return what

    def publish(sample: Sample, earlier: Sample) -> None:
        seen.append(sample)
        done.set()

    reporter = Reporter(read, publish, 0.01)
    reporter.start()
    assert done.wait(30)
    reporter.stop()
    assert seen[0] is FIRST
    assert [r.message for r in caplog.records] == ["HiSparse metrics: a reading failed: RuntimeError: gone"]


def test_events_add_up() -> None:
    events.count(metrics.ABORTS, "client", 2)
    events.count(metrics.ABORTS, "client")
    assert events.read() == {(metrics.ABORTS, "client"): 3}
