"""A trace arrives in the file as it was selected, whatever becomes of those who asked for it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from serving import HOT, LAYERS, TOP_K, Serving, until
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.observe import asking, recorder, request, ring, trace, tracefile
from sglang_hisparse_plugin.observe.counters import Counters
from sglang_hisparse_plugin.observe.recorder import NothingRecorded
from sglang_hisparse_plugin.observe.request import BadRequest, Request


def test_what_is_selected_while_a_trace_is_asked_for_is_in_the_file(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    serving.call(0)  # nobody has asked yet
    recording = serving.recording(Request(1.0, 1))
    expected = [*serving.call(0), *serving.call(2)]
    serving.call(1)  # a layer that is not recorded
    trace.forget(3)
    [head, slot, _, *tail], other = serving.call(0)
    expected += [[head, slot, 1, *tail], other]
    path = recording.file()
    serving.call(0)
    found = tracefile.read(path)
    assert found.rows.tolist() == expected
    assert (found.hot_buffer, found.top_k, found.layers, found.model_layers) == (HOT, TOP_K, (0, 2), LAYERS)
    assert found.lost == 0 and [*tmp_path.iterdir()] == [path]


def test_a_ring_that_runs_over_says_how_much_it_lost_and_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "BYTES", 0)  # the smallest ring: 64 rows
    monkeypatch.setattr(recorder, "DRAIN", 0.5)
    serving = Serving(tmp_path)
    recording = serving.recording(Request(1.0, 1))
    expected = [row for _ in range(100) for row in serving.call(0)]
    found = tracefile.read(recording.file())
    kept = found.rows.tolist()
    assert found.lost == len(expected) - len(kept) >= 100
    assert len(kept) >= 60 and [row for row in expected if row in kept] == kept
    assert kept[-60:] == expected[-60:]


def test_rows_that_a_call_may_be_writing_over_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`written` grows after the rows are there: as many as a full batch may be new ones already."""
    monkeypatch.setattr(ring, "BYTES", 0)
    serving = Serving(tmp_path)
    serving.recorder._tap.arm(True)
    for _ in range(32):  # 64 rows: the ring is full, nothing is overwritten yet
        serving.call(0)
    serving.recorder.ring.rows[0].fill_(-7)  # the next call has begun
    found = [(lost, rows.tolist()) for lost, rows in serving.recorder._tap.rows(0, 64)]
    assert sum(lost for lost, _ in found) == 4 and not any(-7 in row for _, rows in found for row in rows)


def test_a_size_bounds_the_file(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    recording = serving.recording(Request(30.0, 1000 / (1 << 20)))
    for _ in range(60):
        serving.call(0)
    path = recording.file()
    assert path.stat().st_size <= 1000
    assert len(tracefile.read(path).rows) > 20


def test_an_idle_server_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(NothingRecorded, match="nothing was decoded"):
        Serving(tmp_path).recorder.record(Request(0.1, 1))
    with pytest.raises(BadRequest, match="has no room for one row of 24 bytes"):
        Serving(tmp_path).recorder.record(Request(1, 1e-6))
    assert not [*tmp_path.iterdir()]


def test_files_of_servers_that_were_killed_go_and_those_of_others_stay(tmp_path: Path) -> None:
    serving = Serving(tmp_path)
    names = (
        "trace-1-aaaaaaaa-1.part",
        "trace-1-bbbbbbbb-1.part",
        "trace-1-cccccccc-1.part",
        "trace-1-dddddddd-1.failed",
    )
    left, held, new, reason = (tmp_path / name for name in names)
    for path in (left, held, new, reason):
        path.write_bytes(b"x")
    for path in (left, held):
        os.utime(path, (1, 1))
    with held.open("rb") as file:
        assert request.lock(file)
        recording = serving.recording(Request(0.2, 1))
        serving.call(0)
        expected = {held, new, recording.file()}
        assert {*tmp_path.iterdir()} == expected


class Seen(TorchDispatchMode):
    """Which operations touch one of some tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() in self.storages:
                self.names.add(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


#: What does not hold up whoever launches on the device: views, a copy into (pinned) memory that is there, a fill.
HARMLESS = {"copy_", "slice", "fill_"}


def test_reading_launches_nothing_that_waits_for_the_device_or_allocates_on_it(tmp_path: Path) -> None:
    """The code is the same for a CPU and a GPU; on a GPU `test_gpu.py` has CUDA itself watch."""
    serving = Serving(tmp_path)
    for _ in range(3):
        serving.call(0)
    tensors = serving.recorder.ring.rows, serving.recorder.ring.written, serving.recorder.ring.armed
    decoding = threading.Thread(target=lambda: (until(lambda: serving.armed), serving.call(0)))
    decoding.start()
    with Seen(*tensors) as seen:
        serving.recorder.record(Request(2, 1))
    assert seen.names == HARMLESS
    counters = Counters(serving.lru)
    with Seen(counters._device) as seen:
        counters.read()
    assert seen.names == {"copy_"}
    with Seen(*tensors) as seen:  # control: what is not harmless shows
        int(tensors[1][0])
        tensors[0][torch.tensor([1, 2])]
    assert {"_local_scalar_dense", "index"} <= seen.names


# --- asked for by the command ---


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A server that decodes all the time, in the folder `tmp_path`."""
    found, stop = Serving(tmp_path), threading.Event()
    found.recorder.start()

    def decode() -> None:
        while not stop.wait(0.01):
            found.call(0)

    thread = threading.Thread(target=decode)
    thread.start()
    yield found
    stop.set()
    thread.join()


#: A shell's background ignores Ctrl-C, and what it starts inherits that.
COMMAND = """
import signal, sys
from sglang_hisparse_plugin.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def explore(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "explore", "--record", str(folder), "--json", "--warm-up=0", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_recorded(serving: Serving) -> None:
    """There is something that could be lost."""
    until(lambda: serving.armed)
    before = int(serving.recorder.ring.written[0])
    until(lambda: int(serving.recorder.ring.written[0]) > before + 20)


def test_ctrl_c_ends_the_recording_and_keeps_it(serving: Serving, tmp_path: Path) -> None:
    asked = explore(tmp_path, "--seconds=3600")
    until_recorded(serving)
    asked.send_signal(signal.SIGINT)
    out, err = asked.communicate(timeout=60)
    assert asked.returncode == 0, err
    report = json.loads(out)
    assert report["calls"] > 20
    assert [str(path) for path in tmp_path.iterdir()] == report["traces"]
    assert not serving.armed


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_later_recording_works_whatever_happened_to_the_client(
    how: signal.Signals, serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = explore(tmp_path, "--seconds=3600")
    until_recorded(serving)
    asked.send_signal(how)
    asked.communicate(timeout=60)
    assert asked.returncode in (128 + how, -how)
    if how != signal.SIGKILL:
        until(lambda: not serving.armed)
    assert main(["explore", "--record", str(tmp_path), "--seconds=0.5", "--warm-up=0", "--json"]) == 0
    [new] = json.loads(capsys.readouterr().out)["traces"]
    assert len([*tmp_path.glob("*.hisparse")]) == 2, "what the first one had recorded is kept"
    assert {path.suffix for path in tmp_path.iterdir()} - {".hisparse"} == set()
    assert tracefile.read(Path(new)).rows.size


def test_a_second_recording_at_once_is_refused_and_leaves_the_first_alone(
    serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = explore(tmp_path, "--seconds=3")
    until(lambda: serving.armed)
    assert main(["explore", "--record", str(tmp_path), "--json"]) == 2
    said = capsys.readouterr()
    assert "another explore has a trace recorded in" in json.loads(said.out)["error"]
    out, err = asked.communicate(timeout=60)
    assert asked.returncode == 0, err
    assert json.loads(out)["calls"] > 100


def test_several_schedulers_write_files_of_their_own_and_all_are_replayed(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = recorder.Recorder(
        serving.recorder.ring, tmp_path, {"hot_buffer": HOT, "item_bytes": 656, "model_layers": 3}
    )
    monkeypatch.setattr(other, "_file", lambda wanted, ending: tmp_path / f"trace-1-{wanted.id}-other{ending}")
    other.start()
    assert main(["explore", "--record", str(tmp_path), "--seconds=1", "--warm-up=0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["traces"]) == 2
    assert report["calls"] == sum(len(tracefile.read(Path(path)).rows) for path in report["traces"])


def test_a_full_disk_is_told_to_whoever_asked(
    serving: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(file: IO[bytes], wanted: Request) -> tuple[int, int]:
        file.write(b"some rows")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(serving.recorder, "_drain", full)
    assert main(["explore", "--record", str(tmp_path), "--json"]) == 2
    said, why = capsys.readouterr(), f"No space left on device: '{tmp_path}'"
    assert why in json.loads(said.out)["error"] and why in " ".join(said.err.split()) and why in caplog.text
    assert not [*tmp_path.iterdir()]
    monkeypatch.undo()
    assert main(["explore", "--record", str(tmp_path), "--seconds=0.5", "--warm-up=0"]) == 0


def test_an_idle_server_is_told_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Serving(tmp_path).recorder.start()
    assert main(["explore", "--record", str(tmp_path), "--seconds=0.5"]) == 2
    assert "nothing was decoded while it was recorded" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_nobody_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "GRACE", 0.5)
    assert main(["explore", "--record", str(tmp_path), "--seconds=3000"]) == 2
    assert "is one running with --hisparse-plugin-trace" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()], "nothing is left that a later server would take for a request"


def test_a_server_that_ends_while_it_records_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asked(folder: Path, wanted: Request) -> None:
        (folder / f"trace-1-{wanted.id}-1.part").write_bytes(b"some rows")

    monkeypatch.setattr(request, "ask", asked)
    assert main(["explore", "--record", str(tmp_path), "--seconds=3000"]) == 2
    assert "the server ended while it recorded; what it wrote until then is in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 4000,
        '{"seconds": 1}',
        '{"seconds": "1", "mib": 1}',
        '{"seconds": Infinity, "mib": 1}',
        '{"seconds": NaN, "mib": 1}',
        '{"seconds": 3601, "mib": 1}',
        '{"seconds": -1, "mib": 1}',
        '{"seconds": true, "mib": 1}',
        '{"seconds": 1, "mib": 0}',
        '{"seconds": 1, "mib": 1e99}',
        '{"seconds": 1, "mib": 1, "id": "../../x"}',
        '{"seconds": 1, "mib": 1, "id": 7}',
    ],
)
def test_a_request_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / request.FILE).write_text(text)
    with pytest.raises(BadRequest):
        request.asked(tmp_path)


def test_a_request_by_hand_is_served_also_after_one_that_made_no_sense(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / request.FILE).write_text('{"seconds": 1e999, "mib": 1}')
    until(lambda: "is no number above 0 and up to 3600" in caplog.text)
    (tmp_path / request.FILE).write_text('{"seconds": 0.3, "mib": 1}')
    until(lambda: any(tmp_path.glob("*.hisparse")))
