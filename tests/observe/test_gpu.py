"""Counters and traces under CUDA graphs: what a replay does is counted and recorded, and read aside.

While they are read, CUDA's sync debug mode makes an error of whatever waits for the device.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hisparse_plugin.config import Config
from sglang_hisparse_plugin.kernels import swap_in as kernels
from sglang_hisparse_plugin.kernels.counters import COPIES, HITS, REQUESTS
from sglang_hisparse_plugin.observe import counters, replay, start, trace, tracefile
from sglang_hisparse_plugin.observe.request import Request

pytestmark = pytest.mark.gpu

HOT, TOP_K, CONTEXT, STEPS = 64, 16, 1000, 40


def test_replays_are_counted_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    start.prepare(SimpleNamespace(enable_metrics=True), Config())
    lru = torch.arange(HOT, dtype=torch.int16, device="cuda").repeat(2, 3, 1)
    coordinator = SimpleNamespace(lru_slots=lru, top_k=TOP_K, item_size_bytes=16)
    start.attach(coordinator)
    trace.attach(coordinator, Config(trace_dir=str(tmp_path), trace_layers=(1,)))
    recorder = trace.recorder()
    assert recorder is not None
    call = {
        "top_k_tokens": torch.zeros(2, TOP_K, dtype=torch.int32, device="cuda"),
        "device_buffer_tokens": torch.arange(HOT + 1, dtype=torch.int32, device="cuda").repeat(3, 1),
        "host_cache_locs": torch.arange(3 * CONTEXT, device="cuda").view(3, CONTEXT),
        "device_buffer_locs": torch.arange(3 * (HOT + 1), dtype=torch.int32, device="cuda").view(3, -1),
        "host_cache": torch.zeros(3 * CONTEXT, 16, dtype=torch.uint8).pin_memory(),
        "device_buffer": torch.zeros(3 * (HOT + 1), 16, dtype=torch.uint8, device="cuda"),
        "top_k_device_locs": torch.zeros(2, TOP_K, dtype=torch.int32, device="cuda"),
        "req_pool_indices": torch.tensor([2, 1], device="cuda"),
        "seq_lens": torch.tensor([500, 1], device="cuda"),
        "lru_slots": lru[1],
        "item_size_bytes": 16,
        "num_top_k": TOP_K,
        "hot_buffer_size": HOT,
        "num_real_reqs": torch.zeros(1, dtype=torch.int32, device="cuda"),
    }

    def op() -> None:
        trace.record(call)
        kernels.swap_in(**call, counters=counters.row_for(call["lru_slots"]))

    op()  # no real request: builds the kernel, changes nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op()
    call["num_real_reqs"].fill_(1)
    done: list[Path] = []
    armed = threading.Event()
    monkeypatch.setattr(recorder._tap, "arm", lambda on, arm=recorder._tap.arm: (arm(on), armed.set()))
    memory = torch.cuda.memory_allocated()
    thread = threading.Thread(target=lambda: done.append(recorder.record(Request(3.0, 1))))
    torch.cuda.set_sync_debug_mode("error")  # of all threads
    try:
        thread.start()
        assert armed.wait(30)
        for _ in range(3):
            counters.attached()[0].read()
        assert torch.cuda.memory_allocated() == memory
        with pytest.raises(RuntimeError, match="synchronizing"):  # control
            int(recorder.ring.written[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.manual_seed(0)
    for step in range(STEPS):
        call["seq_lens"].copy_(torch.tensor([501 + step, 1]))
        call["top_k_tokens"].copy_(torch.randint(0, 150, (2, TOP_K), dtype=torch.int32))
        graph.replay()
    thread.join()
    found = tracefile.read(done[0])
    told = replay.replay([found], HOT, warm_up=0)
    [counted] = counters.attached()
    idle, busy = counted.read()
    assert found.rows.shape[0] == STEPS and found.rows[:, :2].tolist() == [[1, 2]] * STEPS
    assert not any(idle)
    assert (busy[HITS], busy[COPIES], busy[REQUESTS]) == (told.hits, told.misses, STEPS)
    assert told.hits > 0 and told.misses > 0
