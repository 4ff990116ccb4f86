"""A file is a trace, or `BadTrace` says why not; nothing else comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.observe import replay, tracefile

ABOUT = {"hot_buffer": 4, "item_bytes": 656, "top_k": 2, "layers": [0, 5], "model_layers": 61}
ROWS = [[0, 1, 0, 10, 0, 7], [0, 1, 0, 11, 7, 8], [0, 1, 1, 10, 7, 8], [5, 1, 0, 11, 0, 1]]


def data(rows: list[list[int]] = ROWS, **about: Any) -> bytes:
    return tracefile.header(ABOUT | about) + np.array(rows, dtype="<i4").tobytes()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(data())
    assert tracefile.read(tmp_path / "t").rows.tolist() == ROWS


def test_a_row_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(data()[:-3])
    assert len(tracefile.read(tmp_path / "t").rows) == 3


def test_rows_that_were_lost_are_known(tmp_path: Path) -> None:
    gaps = [np.frombuffer(tracefile.gap(n, 2), dtype="<i4").tolist() for n in (7, 5)]
    (tmp_path / "t").write_bytes(data([gaps[0], *ROWS, gaps[1]]))
    found = tracefile.read(tmp_path / "t")
    assert (found.rows.tolist(), found.lost) == (ROWS, 12)


BAD = {
    "empty": (b"", "no header"),
    "no JSON": (b"\x00\xff\n", "no header"),
    "a list": (b"[1]\n", "no header"),
    "null": (b"null\n", "no header"),
    "deep": (b"[" * 60000 + b"\n", "no header"),
    "a long line": (b" " * 100000, "no header"),
    "header cut off": (data()[:40], "cut off"),
    "another format": (b'{"format": "other"}\n', "has format 'other'"),
    "a later version": (data().replace(b"trace 1", b"trace 2"), "trace 1' is known here"),
    "nothing else": (b'{"format": "sglang-hisparse trace 1"}\n', "hot_buffer is None"),
    "no rows": (data([]), "holds no selection"),
    "gaps alone": (data([[-1, 5, 0, 0, -1, -1]]), "holds no selection"),
    "hot buffer 0": (data(hot_buffer=0), "hot_buffer is 0"),
    "hot buffer beyond int16": (data(hot_buffer=32768), "not 1 to 32767"),
    "hot buffer huge": (data(hot_buffer=10**30), "hot_buffer is 1000"),
    "hot buffer inf": (data(hot_buffer=float("inf")), "hot_buffer is inf"),
    "hot buffer text": (data(hot_buffer="128"), "hot_buffer is '128'"),
    "hot buffer true": (data(hot_buffer=True), "hot_buffer is True"),
    "rows of no bytes": (data(item_bytes=0), "item_bytes is 0"),
    "negative top-k": (data(top_k=-4), "top_k is -4"),
    "top-k beyond the buffer": (data(top_k=5), "cannot hold 5"),
    "no layers": (data(layers=[]), "layers is []"),
    "layers text": (data(layers="ab"), "layers is 'ab'"),
    "layers twice": (data(layers=[0, 0]), "different numbers"),
    "layer beyond": (data(layers=[0, 61]), "layers is 61"),
    "layer negative": (data(layers=[-1, 0, 5]), "layers is -1"),
    "model of no layers": (data(model_layers=0), "model_layers is 0"),
    "a row's layer": (data([*ROWS, [3, 1, 0, 10, 0, 7]]), "row 4 says layer 3"),
    "a row's slot": (data([[0, -1, 0, 10, 0, 7]]), "slot -1"),
    "a row's generation": (data([[0, 1, -1, 10, 0, 7]]), "generation -1"),
    "a row's length": (data([[0, 1, 0, 2**31 - 1, 0, 7]]), "length 2147483647"),
    "a row's length negative": (data([[0, 1, 0, -5, 0, 7]]), "length -5"),
    "less than nothing lost": (data([*ROWS, [-1, -5, 0, 0, 0, 0]]), "-5 rows were lost"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, says = BAD[name]
    (tmp_path / "t").write_bytes(content)
    assert main(["explore", str(tmp_path / "t"), "--json"]) == 2
    said = capsys.readouterr()
    assert says in json.loads(said.out)["error"] and says in " ".join(said.err.split())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file of which bytes were changed, taken out or put in, anywhere."""
    content = bytearray(data())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = start + draw(st.integers(0, 12))
        content[start:end] = draw(st.one_of(st.binary(max_size=12), st.from_regex(rb"-?[0-9e.]{1,9}", fullmatch=True)))
    return bytes(content)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_a_damaged_file_is_a_trace_or_badtrace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    try:
        trace = tracefile.read(tmp_path / "t")
    except tracefile.BadTrace:
        return
    assert trace.rows.shape == (len(trace.rows), tracefile.HEAD + trace.top_k) and len(trace.rows)
    assert 1 <= trace.top_k <= trace.hot_buffer <= 32767 and trace.lost >= 0
    assert {*trace.rows[:, 0].tolist()} <= {*trace.layers} <= {*range(trace.model_layers)}
    if trace.rows[:, 3].max() < 100000:  # a longer sequence is possible, and slow
        replay.replay([trace], trace.hot_buffer, warm_up=0)
