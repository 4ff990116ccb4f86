"""The overlay `swap-in`: each release's real coordinator reaches our op, and what ours is not for goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from world import World

from sglang_hisparse_plugin.demo import cpu, releases
from sglang_hisparse_plugin.kernels import build
from sglang_hisparse_plugin.kernels import swap_in as kernels
from sglang_hisparse_plugin.matrix import TESTED
from sglang_hisparse_plugin.overlays import swap_in as overlay

HERE = Path(__file__).parent


@pytest.mark.parametrize("release", TESTED)
def test_the_real_coordinator_reaches_our_op(release: str) -> None:
    env = cpu.environment(releases.fetch(release))
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(HERE), str(HERE.parents[1])])
    done = subprocess.run(
        [sys.executable, HERE / "coordinator.py"], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "Applied" in found["outcome"]
    assert found["steps"] == 12
    newer = tuple(map(int, release.split(".")[:3])) >= (0, 5, 18)
    assert (found["planned"] > 0) == newer
    if release not in ("0.5.10", "0.5.10.post1", "0.5.11"):
        assert found["dsv4"] == "SGLang's load_cache_to_device_buffer_dsv4_mla was called"
        assert "DeepSeek-V4's paged rows are not covered" in done.stderr


class Original:
    """SGLang's kernel: does the same, and counts."""

    def __init__(self) -> None:
        self.calls, self.serve = 0, kernels.swap_in

    def __call__(self, *, page_size, block_size, **call) -> None:
        self.calls += 1
        self.serve(**call)


@pytest.fixture
def routed(monkeypatch):
    original = Original()
    monkeypatch.setattr(overlay, "_failed", [])
    overlay._elsewhere.cache_clear()
    yield original, lambda **call: overlay.swap_in(original, page_size=1, block_size=960, **call)
    overlay._elsewhere.cache_clear()


def one_step(op) -> None:
    world = World(requests=1, context=40, top_k=4, hot=8)
    world.step(op, [0], [world.choose(30)], [30])


def test_ours_serves(routed) -> None:
    original, op = routed
    one_step(op)
    assert original.calls == 0


def test_another_platform_keeps_its_kernel(routed, monkeypatch, caplog) -> None:
    original, op = routed
    monkeypatch.setattr("torch.version.hip", "6.4")
    one_step(op)
    one_step(op)
    assert original.calls == 2
    assert [record.message for record in caplog.records if "swap-in" in record.message] == [
        "HiSparse overlay swap-in: skipped on ROCm; SGLang's own kernel serves"
    ]


def test_cuda_without_a_compiler_keeps_sglangs_kernel(routed, monkeypatch, caplog) -> None:
    """It may be built already; our op would fall to plain torch, which no CUDA graph can capture."""
    original, _ = routed
    calls = []
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr(kernels, "swap_in", lambda **call: calls.append("ours"))
    monkeypatch.setattr(original, "serve", lambda **call: calls.append("SGLang's"))
    cuda = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    overlay.swap_in(original, page_size=1, block_size=960, device_buffer=cuda)
    overlay.swap_in(original, page_size=1, block_size=960, device_buffer=cuda)
    assert calls == ["SGLang's", "SGLang's"]
    assert [record.message for record in caplog.records] == [
        "HiSparse overlay swap-in: skipped, no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME; "
        "SGLang's own kernel serves"
    ]
    overlay._elsewhere.cache_clear()
    monkeypatch.setattr(build, "find_nvcc", lambda: "nvcc")
    overlay.swap_in(original, page_size=1, block_size=960, device_buffer=cuda)
    assert calls[2:] == ["ours"]


def test_a_kernel_that_does_not_build_leaves_sglangs(routed, monkeypatch, caplog) -> None:
    original, op = routed

    def failing(**call) -> None:
        raise RuntimeError("ninja: no such file")

    monkeypatch.setattr(kernels, "swap_in", failing)
    one_step(op)
    one_step(op)
    assert original.calls == 2
    said = [record.message for record in caplog.records]
    assert said == ["HiSparse overlay swap-in: SGLang's own kernel serves, ours cannot be built: ninja: no such file"]


def test_a_buffer_that_does_not_fit_leaves_sglangs(routed, monkeypatch, caplog) -> None:
    original, op = routed

    def refused(**call) -> None:
        raise build.TooLittleSharedMemory("needs 131072 bytes, has 101376")

    monkeypatch.setattr(kernels, "swap_in", refused)
    one_step(op)
    one_step(op)
    assert original.calls == 2
    said = [record.message for record in caplog.records]
    assert said == [
        "HiSparse overlay swap-in: SGLang's own kernel serves, ours cannot run: needs 131072 bytes, has 101376"
    ]


def test_a_broken_contract_is_not_passed_on(routed) -> None:
    original, op = routed
    world = World(requests=1, context=40, top_k=4, hot=8)
    world.lru = world.lru.int()
    with pytest.raises(TypeError, match=r"lru_slots is torch.int32: torch.int16 is needed"):
        world.step(op, [0], [world.choose(30)], [30])
    assert original.calls == 0
