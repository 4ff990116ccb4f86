"""The command around the checks: what it refuses, what it prints, and what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.demo import checks, cpu, model, results
from sglang_hisparse_plugin.demo.report import Report

COORDINATOR = "class HiSparseCoordinator:\n    pass\n"
HANGS = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    """Has HiSparse as far as its source tells, and a server that never is ready."""
    root = tmp_path / "unpacked"
    files = {
        "__init__.py": "",
        "launch_server.py": HANGS,
        "srt/server_args.py": "enable_hisparse: bool = False\n",
        "srt/managers/hisparse_coordinator.py": COORDINATOR,
    }
    for name, text in files.items():
        file = root / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence on stderr with which the command ends before anything runs."""
    assert main(["demo", "--json", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


def test_an_sglang_without_hisparse(capsys: pytest.CaptureFixture[str], sglang: Path) -> None:
    (sglang / "sglang/srt/managers/hisparse_coordinator.py").unlink()
    (sglang / "sglang/srt/server_args.py").write_text("")
    assert "has no HiSparse; take a release from 0.5.10.post1 on" in refused(capsys, "--sglang-path", str(sglang))


@pytest.mark.parametrize("release", ["", "../../etc"])
def test_a_release_that_is_none(capsys: pytest.CaptureFixture[str], release: str) -> None:
    assert "is no release of SGLang" in refused(capsys, "--release", release)


def test_a_work_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], sglang: Path) -> None:
    said = refused(capsys, "--sglang-path", str(sglang), "--work-dir", "/proc/x")
    assert "/proc/x" in said and "--work-dir" in said


def test_no_gpu(capsys: pytest.CaptureFixture[str], sglang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "use --device cpu" in refused(capsys, "--device", "cuda", "--sglang-path", str(sglang))


def test_too_few_gpus(capsys: pytest.CaptureFixture[str], sglang: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    said = refused(capsys, "--device", "cuda", "--tp", "2", "--sglang-path", str(sglang))
    assert "--tp 2 needs 2 GPUs, and torch finds 1" in said


def start(sglang: Path, temporary: Path, first: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which runs `first` before; its temporary files go into `temporary`."""
    temporary.mkdir()
    script = f"{first}; from sglang_hisparse_plugin.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", f"import resource, signal, sys; {script}", "demo", "--sglang-path", str(sglang)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


def test_a_full_disk_leaves_nothing_behind(sglang: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    process = start(sglang, temporary, "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    assert f"cannot write the model to {temporary}" in err.splitlines()[-1]
    assert not list(temporary.glob("sglang-hisparse-demo-*"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_interruption_ends_the_server_and_leaves_nothing_behind(
    sglang: Path, tmp_path: Path, how: signal.Signals
) -> None:
    temporary = tmp_path / "tmp"
    process = start(sglang, temporary, f"signal.signal({int(how)}, signal.SIG_DFL)")  # a test runner may ignore it
    try:
        server = wait_for_pid(temporary)
        process.send_signal(how)
        process.communicate(timeout=60)
        assert process.returncode == 128 + how
    finally:
        process.kill()
    assert not Path(f"/proc/{server}").exists()
    assert not list(temporary.glob("sglang-hisparse-demo-*"))


def wait_for_pid(temporary: Path) -> int:
    """Of the server, as its log says it."""
    for _ in range(1200):
        for log in temporary.glob("sglang-hisparse-demo-*/*.log"):
            if words := log.read_text().split():
                return int(words[words.index("pid") + 1])
        time.sleep(0.05)
    raise TimeoutError("no server was started")


def test_a_result_goes_to_stdout_and_progress_in_lines_to_stderr(
    capsys: pytest.CaptureFixture[str], sglang: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(launcher: Any) -> Report:
        for text in ("starting", "starting", "walks"):
            launcher.progress(text)
        return report((True, "fine"), (None, "none"), (False, "[rank0]: ends with x=2, y"))

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.setattr(model, "write", lambda folder, *_: folder)
    arguments = ["demo", "--sglang-path", str(sglang), "--work-dir", str(tmp_path / "work")]
    verdict = "1 of 2 checks fail on SGLang unknown, cpu; 1 not applicable"

    assert main([*arguments, "--json"]) == 1
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert (record["verdict"], record["stand_ins"]) == (verdict, list(cpu.STAND_INS.values()))
    lines = [f"SGLang unknown: {text}" for text in ("writing the model", "starting", "walks")]
    assert err.splitlines() == [*lines, f"Logs: {tmp_path / 'work'}", verdict]

    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == verdict
    assert "[rank0]: ends with x=2, y" in " ".join(out.split())
    assert all(f"- {text}." in out for text in cpu.STAND_INS.values())
    assert err.splitlines() == lines


def report(*outcomes: tuple[bool | None, str]) -> Report:
    made = Report("unknown", figures={"seconds": 1.0})
    for passed, detail in outcomes:
        made.add("a check", passed, detail)
    return made


def test_verdicts() -> None:
    good = report((True, ""), (True, ""))
    assert results.verdict("cpu", [good, good]) == "all 4 checks hold on SGLang unknown and unknown, cpu"
    assert results.verdict("cpu", [good, report()]) == "not every check was made on SGLang unknown and unknown, cpu"


def test_no_detail_is_cut_off_or_read_as_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    long = "x" * 300
    results.show(Console(file=out, width=60), "cuda", [report((False, f"[red]{long}"))])
    assert out.getvalue().count("x") >= 300
    assert "[red]" in out.getvalue()
