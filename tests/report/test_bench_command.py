"""The command around a bench: a JSON with holes is refused, wrong use is said, and a run is reported as its file is."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
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


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_table_is_as_wide_as_the_terminal_and_loses_no_number(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["bench", f"--from={RECORD}"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= max(columns, 68) and "\u2026" not in shown
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


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where no file may grow beyond 20 KB, as on a disk that fills up."""
    shell = 'ulimit -f 20; exec "$@"'
    command = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "bench", f"--from={RECORD}", *arguments]
    return subprocess.run(["bash", "-c", shell, "bash", *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_full_disk_takes_no_earlier_results_along(option: str, tmp_path: Path) -> None:
    there = tmp_path / "bench.json"
    there.write_text("precious")
    file = there if option == "--json" else tmp_path
    done = limited(f"{option}={file}")
    assert done.returncode == 2 and "cannot write to" in done.stderr
    assert there.read_text() == "precious" and not [name for name in tmp_path.iterdir() if name.name[0] == "."]


def test_a_link_stays_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    assert main(["bench", f"--json={link}", "--from=nowhere.json"]) == 2
    assert link.is_symlink() and not target.exists()
    assert main(["bench", f"--json={link}", f"--from={RECORD}"]) == 0
    assert link.is_symlink() and json.loads(target.read_text()) == RAW
    link.chmod(0o640)
    assert main(["bench", f"--json={link}", f"--from={RECORD}"]) == 0
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_pipe_and_what_a_shell_holds_open_are_written_to(tmp_path: Path) -> None:
    command = f"{sys.executable} -m sglang_hisparse_plugin.cli bench --from={RECORD} --json /dev/stdout"
    done = subprocess.run(["bash", "-c", f"{command} | cat"], capture_output=True, text=True, check=True)
    assert json.JSONDecoder().raw_decode(done.stdout)[0] == RAW
    log = tmp_path / "log"
    log.touch()
    inode = log.stat().st_ino
    subprocess.run(["bash", "-c", f"{command} >> {log}"], capture_output=True, check=True)
    assert log.stat().st_ino == inode and json.JSONDecoder().raw_decode(log.read_text())[0] == RAW


def test_names_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop, long = tmp_path / "loop", tmp_path / ("n" * 250)
    loop.symlink_to(loop)
    assert main(["bench", f"--json={loop}", f"--from={RECORD}"]) == 2
    assert "cannot write to" in capsys.readouterr().err and loop.is_symlink()
    assert main(["bench", f"--json={tmp_path / ('n' * 300)}", f"--from={RECORD}"]) == 2
    assert main(["bench", f"--json={long}", f"--from={RECORD}"]) == 0 and json.loads(long.read_text()) == RAW


def test_any_language_may_be_in_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({**RAW, "note": "\u00e0\u00a0demi\r\n\u4e2d\u3000\u6587"}))
    assert main(["bench", f"--from={file}"]) == 0
    assert "\u4e2d" in capsys.readouterr().out


def test_a_report_keeps_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    engine = tmp_path / "engine.json"
    engine.write_text(json.dumps({"rows": [ROW]}))
    out = tmp_path / "out"
    assert main(["bench", f"--from={RECORD}", f"--report={out}", f"--engine={engine}"]) == 0
    assert (out / "engine.json").exists()
    assert main(["bench", f"--from={RECORD}", f"--report={out}"]) == 0
    assert not (out / "engine.json").exists()


DAMAGED = [
    ("[" * 100_000, "nested too deeply"),
    (json.dumps({**RAW, "extra": [[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]}), "nested too deeply"),
    (json.dumps({**RAW, "sources": "\ud800"}), "characters that cannot be shown: '\\ud800'"),
    (json.dumps({**RAW, "device": "\x1b[31m"}), "characters that cannot be shown: '\\x1b[31m'"),
    (json.dumps({**RAW, "copy_engine_gbps": 10**400}), "no number above 0"),
    (json.dumps({**RAW, "counting_cost_percent": {"a": "b"}}), "counting_cost_percent"),
    (json.dumps({**RAW, "cells": [{**RAW["cells"][0], "batch": float("inf")}]}), "cell 0"),
    (json.dumps(RAW).encode("utf-16"), "no UTF-8"),
]


@pytest.mark.parametrize(("text", "said"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_a_damaged_record_is_named(
    text: str | bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["bench", f"--from={file}", f"--report={tmp_path / 'out'}"]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()


def test_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither rich's nor matplotlib's."""
    cells = json.loads(json.dumps(RAW["cells"]).replace("sglang 0.5.12", "sglang [red]x[/blue]"))
    file = tmp_path / "record.json"
    file.write_text(json.dumps({**RAW, "cells": cells, "device": "$\\bad{$"}))
    assert main(["bench", f"--from={file}", f"--report={tmp_path / 'out'}", f"--json={tmp_path / 'j'}"]) == 0
    assert main(["bench", f"--from={file}"]) == 0
    assert "[red]x[/blue]" in capsys.readouterr().out


def test_without_stderr_stdout_is_json_alone(capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({**RAW, "sources": "0123456789ab"}))
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["bench", f"--from={file}", "--json", f"--report={tmp_path / 'out'}"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"] == "0123456789ab"
