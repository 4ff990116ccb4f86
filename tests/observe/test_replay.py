"""The explorer's buffer does what the swap-in op does, and the command shows what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.kernels import reference
from sglang_hisparse_plugin.kernels.counters import COPIES, COUNTERS, HITS
from sglang_hisparse_plugin.observe import replay, tracefile


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
    outcome = replay.replay([found], 4, warm_up=0)
    assert (outcome.calls, outcome.hits, outcome.misses) == (4, 4, 4)  # the third row is a new request: 7, 8 miss
    assert replay.replay([found], 16, warm_up=0).misses == 0
    assert replay.replay([found], 4, warm_up=1).calls == 1


def test_explore_prints_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.hisparse", ROWS * 3)
    assert main(["explore", str(path), "--sizes", "2,16", "--warm-up", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [p["hot_buffer"] for p in report["curve"]] == [2, 4, 16]
    misses = [p["misses"] for p in report["curve"]]
    assert misses[0] >= misses[1] > misses[2] == 0
    times = [p["expected_us_per_step"] for p in report["curve"]]
    assert times[0] >= times[1] > times[2] > 61 * 2
    assert main(["explore", str(path), "--warm-up", "0"]) == 0
    assert "now" in capsys.readouterr().out


def test_several_traces_count_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(written(tmp_path / name, rows)) for name, rows in (("a", ROWS), ("b", ROWS[:2]))]
    assert main(["explore", *paths, paths[0], "--sizes", "4", "--warm-up", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["traces"] == paths
    [point] = report["curve"]
    assert (report["calls"], point["hits"], point["misses"]) == (6, 6, 6)  # as above, and the first two rows again


def test_lost_selections_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t", [*ROWS, np.frombuffer(tracefile.gap(9, 2), dtype="<i4").tolist()])
    assert main(["explore", str(path), "--warm-up", "0"]) == 0
    assert "9 selections were overwritten" in capsys.readouterr().out
    assert main(["explore", str(path), "--warm-up", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"] == 9


def test_a_curve_stays_within_what_sglang_can_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t", ROWS, hot=20000)
    assert main(["explore", str(path), "--warm-up", "0", "--json"]) == 0
    assert [p["hot_buffer"] for p in json.loads(capsys.readouterr().out)["curve"]] == [
        10000,
        15000,
        20000,
        25000,
        30000,
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give traces"),
        (["T", "--record", "D"], "give traces"),
        (["T", "other"], "other models or hot buffers"),
        (["T", "--sizes", "1"], "cannot hold the top-k of 2"),
        (["T", "--sizes", "many"], "no list of numbers"),
        (["T", "--sizes", ""], "no list of numbers"),
        (["T", "--sizes", "8,32768"], "so 1 to 32767"),
        (["T", "--sizes=-4"], "so 1 to 32767"),
        (["--record", ".", "--sizes", "0"], "so 1 to 32767"),  # before anything is recorded
        (["T", "--batch", "0"], "--batch must be"),
        (["T", "--batch", "9" * 400], "--batch must be"),
        (["T", "--warm-up=-1"], "--warm-up not negative"),
        (["T", "--seconds", "nan"], "seconds: nan is no number"),
        (["--record", ".", "--seconds", "inf"], "above 0 and up to 3600"),
        (["--record", ".", "--seconds", "3601"], "above 0 and up to 3600"),
        (["--record", ".", "--mib", "inf"], "above 0 and up to 16384"),
        (["T"], "more than --warm-up 8"),
        (["missing"], "No such file"),
        (["."], "Is a directory"),
        (["--record", "missing"], "start the server with --hisparse-plugin-trace"),
        (["--record", "T"], "start the server with --hisparse-plugin-trace"),
        (["T", "--seconds", "long"], "invalid float value"),
        (["T", "--colour"], "unrecognized arguments"),
    ],
)
def test_wrong_use_is_said(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "T", ROWS)
    written(tmp_path / "other", ROWS, hot=8)
    for more in ([], ["--json"]):
        try:
            code = main(["explore", *arguments, *more])
        except SystemExit as left:
            code = left.code
        said = capsys.readouterr()
        err = " ".join(said.err.split())  # it may be broken into lines
        assert code == 2 and says in err
        errors = [json.loads(line)["error"] for line in said.out.splitlines()]
        assert [says in error and error in err for error in errors] == [True] * len(more)
    assert not (tmp_path / "record").exists()
