"""A run on a GPU that is not there: its times are those of the record, its link is as each test says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pages import RAW

from sglang_hisparse_plugin import provenance
from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.report import data

torch = pytest.importorskip("torch")

from sglang_hisparse_plugin.kernels import bench, build  # noqa: E402

BLOCKS = (8, 132)
BEFORE = {576: 48.8, 656: 47.4, 1152: 51.0}


class Link:
    """Answers with a rate for each row size before the grid, and with another after it."""

    def __init__(self) -> None:
        self.before, self.after, self.grid_done = dict(BEFORE), dict(BEFORE), False

    def scattered(self, arena: object, row: int) -> dict[int, float]:
        best = (self.after if self.grid_done else self.before)[row]
        return dict(zip(BLOCKS, (best / 2, best), strict=True))

    def measured(self, cells, kernels, *, replays, arena):
        times = {tuple(cell[axis] for axis in data.AXES): cell["us"]["plugin"] for cell in RAW["cells"]}
        for cell in cells:
            us = {name: times[cell] * (1 if name.startswith("plugin") else 2) for name in kernels}
            yield bench.Result(cell, us, dict(us), dict(us))
        self.grid_done = True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    stand_ins = {
        "plugin_kernel": lambda: None,
        "counting": lambda *_: None,
        "installed_kernel": lambda: {"sglang 1": None},
        "Arena": lambda *_: SimpleNamespace(device="cuda:0"),
        "scattered_ceiling": link.scattered,
        "copy_engine_gbps": lambda arena: 55.2,
        "measure": link.measured,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "X")
    return link


def measured(file: Path, *arguments: str) -> dict:
    assert main(["bench", f"--json={file}", *arguments]) == 0
    return json.loads(file.read_text())


def test_no_kernel_is_timed_on_what_another_left_in_l2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay after another kernel's is slower here, ten times; none of these may be in a result."""
    cell, replayed = bench.Cell(1, 0, 656, 4096), [""]

    def replay(name: str, reset: object) -> float:
        after, replayed[0] = replayed[0], name
        return bench.STEPS / 1e3 * (1 if after == name else 10)

    scene = SimpleNamespace(steps=lambda kernel: kernel, reset=None, verify=lambda name: None)
    monkeypatch.setattr(bench, "Scene", lambda *_: scene)
    monkeypatch.setattr(bench, "capture_graph", lambda steps, reset: steps)
    monkeypatch.setattr(bench, "time_replay", replay)
    kernels = {"ours": "ours", "theirs": "theirs"}
    (result,) = bench.measure([cell], kernels, replays=3, arena=object())
    assert result.median == result.low == result.high == {"ours": 1.0, "theirs": 1.0}


def test_a_run_is_reported_as_its_file_is(link: Link, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    link.after[656] = 45.0
    record = measured(file, f"--report={tmp_path / 'live'}")
    assert main(["bench", f"--from={file}", f"--report={tmp_path / 'again'}"]) == 0
    assert record["sources"] == build.source_digest() and len(record["sources"]) == 12
    assert "commit" in record and record["commit"] == provenance.commit()
    live, again = ((tmp_path / name / "index.html").read_text() for name in ("live", "again"))
    assert live == again and live.count(">2.00</td>") == len(RAW["cells"])
    assert "<td>47.4 (47.4 before the grid, 45.0 after it)</td>" in live


def test_a_fresh_table_says_what_it_is_of(link: Link, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """From a wheel on a machine that does not tell its driver: unknown, as in a file of it."""
    monkeypatch.setattr(provenance, "commit", lambda: None)
    monkeypatch.setattr(provenance, "driver", lambda: None)
    assert main(["bench", "--quick"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"commit unknown, kernel sources {build.source_digest()}, date 20" in shown
    assert f"device X, driver unknown, torch {torch.__version__}, CUDA {torch.version.cuda or 'unknown'}, each" in shown


@pytest.mark.parametrize("after", [50.0, 45.0], ids=["faster", "slower"])
def test_the_bound_is_of_the_faster_link(after: float, link: Link, tmp_path: Path) -> None:
    """One cell by hand: 3 us for the plan, 2 for a round trip, and the bytes at the larger of the two rates."""
    link.after[656] = after
    record = measured(tmp_path / "run.json", "--quick")
    best = max(47.4, after)
    assert record["scattered_gbps"] == {"656": best}
    assert record["scattered_gbps_runs"] == {
        "before": {"656": {"8": 23.7, "132": 47.4}},
        "after": {"656": {"8": after / 2, "132": after}},
    }
    (cell,) = (cell for cell in record["cells"] if (cell["batch"], cell["misses"]) == (64, 2048))
    assert cell["bound_us"] == pytest.approx(5 + 64 * 2048 * 656 / best / 1e3, abs=0.001)
    assert cell["over_bound"]["plugin"] == pytest.approx(cell["us"]["plugin"] / cell["bound_us"], abs=0.001)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (47.4 / 1.019, "47.4 at 656 B"),
        (47.4 * 1.019, "48.3 at 656 B"),
        (47.4 / 1.021, "47.4 (47.4 before the grid, 46.4 after it) at 656 B"),
        (47.4 * 1.021, "48.4 (47.4 before the grid, 48.4 after it) at 656 B"),
    ],
)
def test_a_link_that_drifted_is_told(
    after: float, said: str, link: Link, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link.after[656] = after
    for asked in (["--quick", f"--json={tmp_path / 'run.json'}"], [f"--from={tmp_path / 'run.json'}"]):
        assert main(["bench", *asked]) == 0
        assert f"scattered rows, GB/s: {said} Counters" in " ".join(capsys.readouterr().out.split())


def test_a_record_of_one_run_of_the_link(link: Link, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As `describe_machine` alone makes it, or as it was before."""
    machine = bench.describe_machine(bench.Arena(), [656])
    assert machine["scattered_gbps"] == {656: 47.4} and list(machine["scattered_gbps_runs"]) == ["before"]
    for runs in (machine["scattered_gbps_runs"], None, {}):
        file = tmp_path / "run.json"
        raw = {**RAW, "scattered_gbps": {**RAW["scattered_gbps"], "656": 47.4}, "scattered_gbps_runs": runs}
        file.write_text(json.dumps(raw))
        assert main(["bench", f"--from={file}"]) == 0
        assert "47.4 at 656 B" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("sources", ["0123456789ab", None, {}])
def test_a_file_of_another_kernel_is_announced(
    sources: object, link: Link, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    record = measured(file)
    assert record["replays"] > 0 and record["steps"] == bench.STEPS and record["top_k"] == bench.TOP_K
    assert main(["bench", f"--from={file}"]) == 0
    same = capsys.readouterr()
    assert "installed" not in same.err
    assert "each replay follows a replay of the same kernel" in " ".join(same.out.split())
    del record["timed_after"]
    file.write_text(json.dumps({**record, "sources": sources}))
    assert main(["bench", f"--from={file}"]) == 0
    said = capsys.readouterr()
    named = sources or "unknown"
    assert f"is of kernel sources {named}, and installed are {build.source_digest()}" in " ".join(said.err.split())
    assert "each replay follows unknown" in " ".join(said.out.split())
