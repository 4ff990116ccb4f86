"""The explorer's buffer does what the swap-in op does, and a trace arrives in the file as it was selected."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.config import Observation
from sglang_hisparse_plugin.kernels import reference
from sglang_hisparse_plugin.kernels.counters import COPIES, COUNTERS, HITS
from sglang_hisparse_plugin.observe import replay, trace, tracefile


def by_the_op(hot: int, steps: list[tuple[list[int], int]]) -> list[tuple[int, int]]:
    """Hits and misses of each step, as `kernels/reference.py` counts them, from a new request's tables."""
    most = max(length for _, length in steps)
    tokens = torch.arange(hot, dtype=torch.int32)[None]
    lru = torch.arange(hot, dtype=torch.int16)[None]
    found = []
    for selected, length in steps:
        counted = torch.zeros(COUNTERS, dtype=torch.int64)
        reference.swap_in(
            top_k_tokens=torch.tensor([selected], dtype=torch.int32),
            device_buffer_tokens=tokens,
            host_cache_locs=torch.arange(most)[None],
            device_buffer_locs=torch.arange(hot + 1, dtype=torch.int32)[None],
            host_cache=torch.zeros(most, 1, dtype=torch.uint8),
            device_buffer=torch.zeros(hot + 1, 1, dtype=torch.uint8),
            top_k_device_locs=torch.zeros(1, len(selected), dtype=torch.int32),
            req_pool_indices=torch.tensor([0]),
            seq_lens=torch.tensor([length]),
            lru_slots=lru,
            item_size_bytes=1,
            num_top_k=len(selected),
            hot_buffer_size=hot,
            counters=counted,
        )
        found.append((int(counted[HITS]), int(counted[COPIES])))
    return found


@st.composite
def selections(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], int]]]:
    hot = draw(st.integers(1, 12))
    top_k = draw(st.integers(1, hot))
    length = draw(st.integers(1, 20))
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        steps.append((draw(st.lists(st.integers(-1, length), min_size=top_k, max_size=top_k)), length))
        length += 1
    return hot, steps


@settings(max_examples=300, deadline=None)
@given(selections())
def test_replay_equals_the_op(case: tuple[int, list[tuple[list[int], int]]]) -> None:
    hot, steps = case
    buffer = replay.HotBuffer(hot)
    assert [buffer.select(np.array(s, dtype=np.int32), n) for s, n in steps] == by_the_op(hot, steps)


def test_replay_by_hand() -> None:
    """Hot buffer 4 over 10 tokens: it holds 0 1 2 3; 9 is the newest."""
    buffer = replay.HotBuffer(4)
    assert buffer.select(np.array([9, 2, 7], dtype=np.int32), 10) == (2, 1)
    assert buffer.order.tolist() == [1, 3, 7, 2]  # 0 went; 7 came; 2 was hit
    assert buffer.select(np.array([0, 7, 0], dtype=np.int32), 11) == (2, 1)
    assert buffer.order.tolist() == [3, 2, 0, 7]


def written(path: Path, rows: list[list[int]], top_k: int = 2, hot: int = 4) -> Path:
    about = {"hot_buffer": hot, "item_bytes": 656, "top_k": top_k, "layers": [0, 5], "model_layers": 61}
    path.write_bytes(tracefile.header(about) + np.array(rows, dtype="<i4").tobytes())
    return path


ROWS = [[0, 1, 0, 10, 0, 7], [0, 1, 0, 11, 7, 8], [0, 1, 1, 10, 7, 8], [5, 1, 0, 11, 0, 1]]


def test_requests_and_layers_have_buffers_of_their_own(tmp_path: Path) -> None:
    found = tracefile.read(written(tmp_path / "t.hisparse", ROWS))
    outcome = replay.replay(found, 4, warm_up=0)
    assert (outcome.calls, outcome.hits, outcome.misses) == (4, 4, 4)  # the third row is a new request: 7, 8 miss
    assert replay.replay(found, 16, warm_up=0).misses == 0
    assert replay.replay(found, 4, warm_up=1).calls == 1


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t.hisparse", ROWS)
    path.write_bytes(path.read_bytes()[:-3])
    assert len(tracefile.read(path).rows) == 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no trace of"),
        (b"\x00\xff\n", "no trace of"),
        (b'{"format": "other"}\n', "has format 'other'"),
        (b'{"format": "sglang-hisparse trace 1"}\n', "no trace of"),
    ],
)
def test_what_is_no_trace_is_said(data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t").write_bytes(data)
    assert main(["explore", str(tmp_path / "t")]) == 2
    assert says in capsys.readouterr().err


def test_explore_prints_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.hisparse", ROWS * 3)
    assert main(["explore", str(path), "--sizes", "2,16", "--warm-up", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["hot_buffer"] for p in report["curve"]] == [2, 4, 16]
    misses = [p["misses"] for p in report["curve"]]
    assert misses[0] >= misses[1] > misses[2] == 0
    times = [p["expected_us_per_step"] for p in report["curve"]]
    assert times[0] >= times[1] > times[2] > 61 * 3
    assert main(["explore", str(path), "--warm-up", "0"]) == 0
    assert "now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a trace"),
        (["T", "--record", "D"], "give a trace"),
        (["T", "--sizes", "1"], "cannot hold the top-k of 2"),
        (["T", "--sizes", "many"], "no list of numbers"),
        (["T", "--batch", "0"], "must be positive"),
        (["T"], "more than --warm-up 8"),
        (["missing"], "No such file"),
        (["--record", "missing"], "start the server with --hisparse-plugin-trace"),
    ],
)
def test_wrong_use_is_said(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "T", ROWS)
    assert main(["explore", *arguments]) == 2
    assert says in capsys.readouterr().err


LAYERS, SLOTS, HOT, TOP_K = 3, 4, 8, 2


class Serving:
    """A coordinator whose calls are recorded, and the recorder of its process."""

    def __init__(self, folder: Path) -> None:
        self.lru = torch.zeros(LAYERS, SLOTS, HOT, dtype=torch.int16)
        coordinator = SimpleNamespace(lru_slots=self.lru, top_k=TOP_K, item_size_bytes=656)
        trace.attach(coordinator, Observation(False, 0.0, str(folder), (0, 2)))
        found = trace.recorder()
        assert found is not None
        self.recorder = found
        self.step = 0

    def call(self, layer: int) -> list[list[int]]:
        """Two requests and a row of padding; returns the rows that are to be recorded."""
        self.step += 1
        tokens = torch.tensor([[self.step, 1], [self.step, 2], [self.step, 3]], dtype=torch.int32)
        call = {"lru_slots": self.lru[layer], "req_pool_indices": torch.tensor([3, 1, 0]), "top_k_tokens": tokens}
        call |= {"seq_lens": torch.tensor([50, 60, 1]), "num_real_reqs": torch.tensor([2], dtype=torch.int32)}
        trace.record(call)
        return [[layer, 3, 0, 50, self.step, 1], [layer, 1, 0, 60, self.step, 2]]


def until(condition, patience: float = 30) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_selected_while_a_trace_is_asked_for_is_in_the_file(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.call(0)  # nobody has asked yet
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(serving.recorder.record(1.0, 1 << 20)))
    thread.start()
    until(lambda: int(serving.recorder.ring.armed[0]) == 1)
    expected = [*serving.call(0), *serving.call(2)]
    serving.call(1)  # a layer that is not recorded
    trace.forget(3)
    [head, *tail], other = serving.call(0)
    expected += [[head, 3, 1, *tail[2:]], other]
    thread.join()
    serving.call(0)
    found = tracefile.read(done[0])
    assert found.rows.tolist() == expected
    assert (found.hot_buffer, found.top_k, found.layers, found.model_layers) == (HOT, TOP_K, (0, 2), LAYERS)


def test_a_ring_that_runs_over_loses_the_oldest_and_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "RING_BYTES", 0)  # the smallest ring: 64 rows
    serving = Serving(tmp_path)
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(serving.recorder.record(1.0, 1 << 20)))
    thread.start()
    until(lambda: int(serving.recorder.ring.armed[0]) == 1)
    expected = [row for _ in range(100) for row in serving.call(0)]
    thread.join()
    rows = tracefile.read(done[0]).rows.tolist()
    assert rows[-64:] == expected[-64:]


def test_a_size_bounds_the_file(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(serving.recorder.record(30.0, 1000)))
    thread.start()
    until(lambda: int(serving.recorder.ring.armed[0]) == 1)
    for _ in range(60):
        serving.call(0)
    thread.join(20)
    assert not thread.is_alive()
    assert done[0].stat().st_size <= 1000
    assert len(tracefile.read(done[0]).rows) > 20


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(tmp_path)

    def full(self: trace.Recorder, file: object, until: float, most: int) -> tuple[int, int]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace.Recorder, "_drain", full)
    serving.recorder.start()
    (tmp_path / "record").write_text('{"seconds": 1, "mib": 1}')
    until(lambda: "No space left" in caplog.text)
    assert [p.name for p in tmp_path.iterdir()] == ["record"]
    monkeypatch.undo()
    (tmp_path / "again").write_text('{"seconds": 0.5, "mib": 1}')
    (tmp_path / "again").replace(tmp_path / "record")
    until(lambda: any(tmp_path.glob("*.hisparse")))
