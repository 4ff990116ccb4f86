"""Prefill and decode on two real servers; the controls are part of what the demo reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASES = os.environ.get("PD_RELEASES", "0.5.12").split(",")
COMMAND = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "demo", "--pd", "--json"]


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_servers(release: str, tmp_path: Path) -> None:
    command = [*COMMAND, f"--release={release}", f"--work-dir={tmp_path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["releases"][0]["checks"]
    assert done.returncode == 0, json.dumps(checks, indent=1)
    assert checks[0]["passed"], f"{checks[0]['detail']} `make long` and `make pd` install it for themselves."
    assert sum(check["passed"] is None for check in checks) <= 1, "only KV may come too late on a slow machine"


@pytest.mark.gpu
def test_two_servers_on_one_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--device=cuda", f"--work-dir={tmp_path}"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--speculative"], ["--load=5"], ["--tp=2"]])
def test_wrong_use(arguments: list[str]) -> None:
    done = subprocess.run([*COMMAND, *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--pd is a set of checks of its own" in done.stderr
    assert "Traceback" not in done.stderr
