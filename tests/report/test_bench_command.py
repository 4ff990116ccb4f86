"""The command around a bench: a JSON with holes is refused, wrong use is said, and a run is reported as its file is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import RAW, RECORD, ROW, changed

from sglang_hisparse_plugin.cli import bench, main
from sglang_hisparse_plugin.report import ReportError, data, read_engine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["cells"].pop(7), "lacks 1 of 252 cells of its grid: batch 2, misses 32"),
        (lambda raw: raw["cells"].clear(), "has no cells"),
        (lambda raw: raw["cells"].append(raw["cells"][0]), "twice"),
        (lambda raw: raw["cells"][3].pop("us"), "cell 3 .*it lacks 'us'"),
        (lambda raw: raw["cells"][3]["us"].pop("sglang 0.5.12"), "cell 3 .*us has plugin"),
        (lambda raw: raw["cells"][3]["us"].update(plugin=0), "a time is not above 0"),
        (lambda raw: raw["cells"][3].update(batch="many"), "cell 3 "),
        (lambda raw: raw["cells"].__delitem__(slice(1, None)), "no cell of .* has a miss"),
        (lambda raw: raw["cells"][3]["spread"].update(plugin=1), "cell 3 .*spread is no pair"),
        (lambda raw: raw.update(copy_engine_gbps="x"), "is no number above 0"),
        (lambda raw: raw["scattered_gbps"].update({"656": "x"}), "is no number above 0"),
        (lambda raw: raw.update(scattered_gbps_runs=[1]), "scattered_gbps_runs .* is not as bench writes it"),
        (lambda raw: raw.update(scattered_gbps_runs={"before": 1}), "scattered_gbps_runs .* is not as bench"),
        (lambda raw: raw.update(scattered_gbps_runs={"after": {"656": {}}}), "scattered_gbps_runs .* is not as bench"),
        (
            lambda raw: raw.update(scattered_gbps_runs={"after": {"656": {"8": 0}}}),
            "scattered_gbps_runs .* is not as bench",
        ),
        (lambda raw: raw.pop("device"), "does not say device"),
        (lambda raw: raw["scattered_gbps"].pop("656"), "no scattered_gbps of rows of 656 bytes"),
    ],
)
def test_holes_are_named(change: Callable[[dict], object], said: str) -> None:
    with pytest.raises(ReportError, match=said):
        data.bench(changed(change))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "has no rows"),
        ('{"rows": [{"release": "0.5.12"}]}', "row 0 .* lacks mode, kernel, concurrency"),
        (json.dumps([{**ROW, "tokens_per_s": "fast"}]), "tokens_per_s is 'fast', which is no number"),
    ],
)
def test_a_wrong_engine_file(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ReportError, match=said):
        read_engine(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from=nowhere.json", "--report=out"], "cannot read nowhere.json"),
        ([f"--from={RECORD}", "--engine=x"], "name its folder with --report"),
        ([f"--from={RECORD}", "--quick"], "--from measures nothing"),
        (["--json=no/folder/x.json"], "cannot write to no/folder/x.json"),
        (["--json=.", f"--from={RECORD}"], "cannot write to .: Is a directory"),
        (["--report=out"], "no CUDA device"),
        ([f"--from={RECORD}", "--report=/dev/null/out"], "cannot write to /dev/null/out"),
        ([f"--from={RECORD}", "--engine=nowhere.json", "--report=out"], "cannot read nowhere.json"),
    ],
)
def test_wrong_use(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not list(tmp_path.iterdir())


def test_without_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", f"--from={RECORD}", f"--report={tmp_path / 'out'}"]) == 2
    assert "pip install 'sglang-hisparse-plugin[report]'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_as_wide_as_the_terminal_and_loses_no_number(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["bench", f"--from={RECORD}"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns and "\u2026" not in shown
    ours = [f"{cell['us']['plugin']:.1f}" for cell in RAW["cells"]]
    rows = [words for line in shown.splitlines() if len(words := line.split()) > 6 and words[0].isdigit()]
    assert sorted(row[2] for row in rows) == sorted(ours)
    assert bool(re.search(r"us +spread", shown)) == (columns == 120)


def test_json_is_printed_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", f"--from={RECORD}", "--json", f"--report={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == RAW and "Report: " in said.err
    assert main(["bench", f"--from={RECORD}", f"--json={tmp_path / 'again.json'}"]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == RAW
    capsys.readouterr()
    assert main(["bench", "--from=nowhere.json", "--json"]) == 2
    assert "cannot read nowhere.json" in json.loads(capsys.readouterr().out)["error"]


def unread(*arguments: str) -> None:
    """Run the command with a stdout whose reader has left, as of `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        with contextlib.suppress(SystemExit):  # as rich ends a program whose output nobody reads
            main(["bench", f"--from={RECORD}", *arguments])
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for what is still in its buffer


def test_a_reader_that_leaves_takes_no_results_along(tmp_path: Path) -> None:
    unread(f"--json={tmp_path / 'run.json'}")
    assert json.loads((tmp_path / "run.json").read_text()) == RAW
    unread("--json", f"--report={tmp_path / 'out'}")
    assert (tmp_path / "out" / "index.html").is_file()


def test_a_reader_that_leaves_hides_no_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unread("--json", f"--report={tmp_path / 'file' / 'out'}")
    assert "cannot write to" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("asked", [[], ["--json"]])
def test_results_whose_files_fail_are_shown(asked: list[str], capsys, monkeypatch, tmp_path: Path) -> None:
    def full(*_: object) -> Path:
        raise ReportError("cannot write to out: No space left on device")

    monkeypatch.setattr(bench, "write", full)
    monkeypatch.setattr(bench, "_measure", lambda options: data.bench(RAW))
    assert main(["bench", *asked, f"--report={tmp_path}"]) == 2
    said = capsys.readouterr()
    assert f"{RAW['cells'][0]['us']['plugin']:.1f}" in said.out and "No space left" in said.err
