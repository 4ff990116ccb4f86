"""The real server under clients that stream, abort and disconnect; its own control is part of what it reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 12
COMMAND = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "demo", "--json"]


def load(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, f"--load={seconds}", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "seconds"), [("--tp=1", SECONDS), ("--tp=2", 3 * SECONDS)])
def test_a_server_survives_its_clients(ranks: str, seconds: float, tmp_path: Path) -> None:
    done = load("--release=0.5.12", ranks, f"--work-dir={tmp_path}", seconds=seconds)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)["releases"][0]
    assert done.returncode == 0, json.dumps(report["checks"], indent=1)
    assert all(check["passed"] for check in report["checks"])
    counts = {kind: report["figures"][kind] for kind in ("exact", "aborted", "disconnected", "refused")}
    assert sum(counts.values()) == report["figures"]["requests"] > 0
    assert counts["refused"] == 0, "there is room for every request"


@pytest.mark.gpu
def test_a_gpu_server_survives_its_clients(tmp_path: Path) -> None:
    done = load("--device=cuda", f"--work-dir={tmp_path}", seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--load=0"], "seconds above 0"),
        (["--load=nan"], "seconds above 0"),
        (["--seed=3"], "--seed goes with --load"),
        (["--load=5", "--speculative"], "take one of them"),
    ],
)
def test_wrong_use(arguments: list[str], says: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
