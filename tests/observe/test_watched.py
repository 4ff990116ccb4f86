"""Metrics and traces of a real server, through HTTP, against answers known beforehand.

Scheduler, coordinator, pools, prometheus and HTTP are SGLang's; kernels are the demo's CPU stand-ins and the reference
op. ``make test`` runs one release, ``make observe`` all that are named there.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_hisparse_plugin.demo import language, model, scales, setup
from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.demo.server import Server
from sglang_hisparse_plugin.kernels.counters import MISS_BUCKETS
from sglang_hisparse_plugin.observe import metrics, replay, request, tracefile

pytestmark = pytest.mark.xdist_group("observe")  # one server for all

RELEASES = os.environ.get("OBSERVE_RELEASES", "0.5.12").split(",")
SCALE = scales.CPU
LAYERS, HOT, TOP_K = SCALE.dims.layers, SCALE.hot_buffer, SCALE.dims.index_topk
PROMPT, STEPS = 1000, 60
QUEUE = 8  # requests that may wait
SETTLE = 6  # seconds: longer than the reporter's interval

Scrape = dict[tuple[str, str], float]
"""By metric, without its prefix, and the value of its own label, if it has one."""


@dataclass
class Watched:
    server: Server
    traces: Path
    work: Path


@pytest.fixture(scope="module", params=RELEASES)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    work = tmp_path_factory.mktemp(f"observe-{request.param}")
    with serving(request.param, work, retract=True, trace=True) as server:
        yield Watched(server, work / "traces", work)


def serving(
    release: str, work: Path, *, retract: bool = False, trace: bool = False, hot: int = HOT, metrics: bool = True
) -> Server:
    folder = work / "model"
    if not folder.exists():
        folder.mkdir()
        model.write(folder, SCALE.dims)
    target = setup.Target(release, fetch(release))
    server = setup.Launcher(target, SCALE, folder, work, lambda text: None).server(f"hot-{hot}", retract=retract)
    sizes = f'"device_buffer_size": {HOT}'
    server.command = [word.replace(sizes, f'"device_buffer_size": {hot}') for word in server.command]
    server.command += [f"--max-queued-requests={QUEUE}"]
    server.command += ["--enable-metrics"] * metrics + [f"--hisparse-plugin-trace={work / 'traces'}"] * trace
    server.env["SGLANG_HISPARSE_PLUGIN_TRACE_LAYERS"] = ",".join(map(str, range(LAYERS)))
    return server


def scrape(server: Server) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Scrape = {}
    own = {name for metric in metrics.METRICS for name in metric.labels} | {"le"}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            if s.name.startswith(metrics.PREFIX):
                assert s.labels["tp_rank"] == "0" and s.labels["model_name"] and s.labels["engine_type"]
                mine = [value for name, value in s.labels.items() if name in own and name != "outcome"]
                found[s.name.removeprefix(metrics.PREFIX), mine[0] if mine else ""] = s.value
    return found


def settled(server: Server) -> Scrape:
    """What an idle server says once it has counted everything."""
    time.sleep(SETTLE)
    return until(server, math.isnan)


def until(server: Server, holds: Callable[[float], bool]) -> Scrape:
    """What the server says as soon as its hit rate of the last seconds is so; it is read anew every five."""
    end = time.monotonic() + 60
    while not holds((found := scrape(server))["swap_in_hit_rate", ""]):
        assert time.monotonic() < end
        time.sleep(0.3)
    return found


def recording(folder: Path, seconds: float) -> None:
    """Ask for a trace, as `explore --record` does, and wait until it is under way."""
    (folder / "new").write_text(json.dumps({"seconds": seconds, "mib": 64}))
    (folder / "new").replace(folder / request.FILE)
    end = time.monotonic() + 30
    while not any(folder.glob("*.part")):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)


def recorded(folder: Path) -> tracefile.Trace:
    (folder / request.FILE).unlink()  # ends it
    end = time.monotonic() + 60
    while not (found := sorted(folder.glob("*.hisparse"))):
        assert time.monotonic() < end
        time.sleep(0.1)
    return tracefile.read(found[-1])


def answers(trace: tracefile.Trace) -> list[tuple[int, int, int]]:
    """Layer, hits and misses of every row, by the policy alone."""
    buffers: dict[tuple[int, ...], replay.HotBuffer] = {}
    found = []
    for row in trace.rows:
        layer, slot, generation, length = (int(n) for n in row[: tracefile.HEAD])
        buffer = buffers.setdefault((layer, slot, generation), replay.HotBuffer(HOT))
        found.append((layer, *buffer.select(row[tracefile.HEAD :], length)))
    return found


def differences(before: Scrape, after: Scrape, right: list[tuple[int, int, int]], row_bytes: int) -> list[str]:
    """What the counters say otherwise than `right`."""
    new = {key: value - before.get(key, 0) for key, value in after.items()}
    expected: Scrape = {}
    for layer in range(LAYERS):
        hits, misses = (sum(answer[i] for answer in right if answer[0] == layer) for i in (1, 2))
        numbers = {"hits": hits, "misses": misses, "bytes": misses * row_bytes}
        expected |= {(f"swap_in_{name}_total", str(layer)): n for name, n in numbers.items()}
    misses_of = [misses for _, _, misses in right]
    for bound in MISS_BUCKETS:
        below = sum(bound is None or m <= bound for m in misses_of)
        expected["swap_in_misses_per_call_bucket", "+Inf" if bound is None else f"{float(bound)}"] = below
    expected["swap_in_misses_per_call_sum", ""] = sum(misses_of)
    expected["swap_in_misses_per_call_count", ""] = len(right)
    return [f"{key}: {new.get(key)}, right is {n}" for key, n in expected.items() if new.get(key) != n]


def test_counters_equal_what_the_policy_says_of_the_selections(watched: Watched) -> None:
    server = watched.server
    before = settled(server)
    for pool in ("device", "host", "logical"):
        assert before["pool_used_slots", pool] == 0 and before["pool_slots", pool] >= SCALE.device_tokens
    assert before["swap_in_misses_per_call_count", ""] == before["staging_queue_reqs", ""] == 0

    recording(watched.traces, 600)
    tokens = language.prompt(PROMPT, seed=1)
    assert server.generate(tokens, STEPS).tokens == language.walk(tokens, STEPS)
    until(server, lambda rate: 0 < rate < 1)
    after = settled(server)
    trace = recorded(watched.traces)
    right = answers(trace)
    retracted = after["retractions_total", "running"] - before["retractions_total", "running"]
    # Of a step's tokens the first comes from the prefill; after a retraction so does the next.
    assert abs(len(right) - LAYERS * (STEPS - retracted)) <= LAYERS
    assert all(hits + misses == TOP_K for _, hits, misses in right)
    dims = SCALE.dims
    row_bytes = trace.item_bytes
    assert differences(before, after, right, row_bytes) == []

    one_more = [*right, right[-1]]
    assert differences(before, after, one_more, row_bytes), "control: a counter that lacks one call must show"
    layer, hits, misses = right[0]
    moved = [(layer, hits + 1, misses - 1), *right[1:]]
    assert len(differences(before, after, moved, row_bytes)) >= 3, "control: one miss called a hit must show"
    assert dims.layers == LAYERS


def test_retractions_and_aborts_are_counted(watched: Watched) -> None:
    server = watched.server
    prompts = [(language.prompt(600 + 40 * i, seed=50 + i), 60) for i in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda p: server.generate(*p), prompts))
    assert [f.tokens == language.walk(*p) for f, p in zip(found, prompts, strict=True)] == [True] * len(prompts)
    before = settled(server)
    said = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log_text())))
    assert said > 0 and before["retractions_total", "running"] + before["retractions_total", "staging"] == said
    assert before["pool_used_slots", "host"] == before["pool_used_slots", "device"] == 0

    abort(server, "to-be-aborted")
    after = settled(server)
    assert after["aborts_total", "client"] - before["aborts_total", "client"] == 1
    assert after["pool_used_slots", "host"] == 0


def test_whoever_is_told_of_an_abort_is_counted(watched: Watched) -> None:
    """In the queue, in prefill, in staging or in decode."""
    server = watched.server
    before, told = settled(server), 0
    for delay in (0.2, 0.6, 1.2):
        with ThreadPoolExecutor(QUEUE) as pool:
            prompts = [language.prompt(900 + 40 * i, seed=70 + i) for i in range(QUEUE)]
            jobs = [pool.submit(ended_by, server, tokens) for tokens in prompts]
            time.sleep(delay)
            ask(server, "/abort_request", {"rid": "", "abort_all": True})
            told += [job.result() for job in jobs].count("abort")
    after = settled(server)
    assert told > 0
    assert after["aborts_total", "client"] - before["aborts_total", "client"] == told
    assert after["pool_used_slots", "host"] == after["pool_used_slots", "device"] == 0


def ended_by(server: Server, tokens: list[int]) -> str:
    """How the answer to a long request says that it ended."""
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}}
    url, headers = f"http://127.0.0.1:{server.port}/generate", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120) as answer:
        return str(json.load(answer)["meta_info"]["finish_reason"]["type"])


def test_refusals_are_counted_by_who_refuses(watched: Watched) -> None:
    server = watched.server
    before, rejected = settled(server), http_responses(server, "400")
    with ThreadPoolExecutor(3 * QUEUE) as pool:
        answers = list(pool.map(lambda seed: status(server, language.prompt(200, seed=seed), 20), range(3 * QUEUE)))
    assert {*answers} == {200, 503}
    assert status(server, language.prompt(5 * SCALE.context, seed=1), 1) == 400
    after = settled(server)
    new = {
        reason: after["refused_admissions_total", reason] - before["refused_admissions_total", reason]
        for reason in ("queue_full", "BadRequestError")
    }
    assert new == {"queue_full": answers.count(503), "BadRequestError": 0}
    assert http_responses(server, "400") - rejected == 1
    assert after["aborts_total", "client"] == before["aborts_total", "client"]


def status(server: Server, tokens: list[int], steps: int) -> int:
    """Of the answer to a request."""
    try:
        server.generate(tokens, steps)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def http_responses(server: Server, code: str) -> float:
    """How many answers SGLang's own metric says have this status."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return sum(
        s.value
        for family in families
        for s in family.samples
        if s.name == "sglang:http_responses_total" and s.labels["status_code"] == code
    )


def abort(server: Server, rid: str) -> None:
    """Start a long request, wait until it decodes, abort it as a client does."""
    body = {"input_ids": language.prompt(1000, seed=9), "rid": rid}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": SCALE.steps, "ignore_eos": True}}
    threading.Thread(target=lambda: ask(server, "/generate", body), daemon=True).start()
    end = time.monotonic() + 60
    while not any(server.internal_state()["hisparse_demo"]["now"][k] < n for k, n in held(server).items()):
        assert time.monotonic() < end
        time.sleep(0.05)
    ask(server, "/abort_request", {"rid": rid})


def held(server: Server) -> dict[str, int]:
    return {"device slots": server.internal_state()["hisparse_demo"]["start"]["device slots"]}


def ask(server: Server, path: str, body: dict[str, Any]) -> None:
    try:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{server.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=120) as answer:
            answer.read()
    except (OSError, http.client.HTTPException):  # an aborted request may end like this
        return


def test_overlays_are_listed(watched: Watched) -> None:
    log = watched.server.log_text()
    logged = dict(re.findall(r"HiSparse overlay (\S+): (applied|skipped|refused)", log))
    with urllib.request.urlopen(f"http://127.0.0.1:{watched.server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = [
        s.labels for f in text_string_to_metric_families(text) for s in f.samples if s.name == metrics.OVERLAY.full
    ]
    assert {labels["overlay"]: labels["outcome"] for labels in samples} == logged
    assert logged["observe"] == "applied"


@pytest.mark.skipif("OBSERVE_RELEASES" not in os.environ, reason="two more servers a release: make observe")
@pytest.mark.parametrize("release", RELEASES)
def test_explore_foretells_a_server_with_another_hot_buffer(release: str, tmp_path: Path) -> None:
    tokens = language.prompt(PROMPT, seed=1)
    with serving(release, tmp_path, trace=True, metrics=False) as server:
        recording(tmp_path / "traces", 600)
        assert server.generate(tokens, STEPS).tokens == language.walk(tokens, STEPS)
        trace = recorded(tmp_path / "traces")
        with pytest.raises(OSError):
            scrape(server)
    with serving(release, tmp_path, hot=2 * HOT) as server:
        assert server.generate(tokens, STEPS).tokens == language.walk(tokens, STEPS)
        found = settled(server)
    counted = [
        sum(found[f"swap_in_{name}_total", str(layer)] for layer in range(LAYERS)) for name in ("hits", "misses")
    ]
    told = replay.replay([trace], 2 * HOT, warm_up=0)
    now = replay.replay([trace], HOT, warm_up=0)
    assert [told.hits, told.misses] == counted
    assert told.misses < now.misses
    assert np.unique(trace.rows[:, 0]).tolist() == [*range(LAYERS)]
