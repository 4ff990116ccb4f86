"""Two ranks of the real server walk exactly, by tensor parallelism and DP attention; controls are in the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "demo", "--json", "--tp=2"]
RELEASES = os.environ.get("RANKS_RELEASES", "0.5.12").split(",")


def ranks(*arguments: str, work: Path) -> list[dict[str, object]]:
    done = subprocess.run([*COMMAND, *arguments, f"--work-dir={work}"], check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    made: list[dict[str, object]] = summary["releases"][0]["checks"]
    assert done.returncode == 0 and summary["tp"] == 2, json.dumps(made, indent=1)
    return made


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_ranks(release: str, tmp_path: Path) -> None:
    made = {str(check["name"]): check["passed"] for check in ranks(f"--release={release}", work=tmp_path)}
    assert sum("on rank 1 alone" in name for name in made) == 2
    assert [passed for name, passed in made.items() if "never answered" in name] == [True]


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_ranks_with_requests_of_their_own(release: str, tmp_path: Path) -> None:
    made = {str(check["name"]) for check in ranks("--dp=2", f"--release={release}", work=tmp_path)}
    assert {f"walks on rank {rank} are exact while no other has requests" for rank in (0, 1)} <= made
    assert sum("on rank 1 alone" in name for name in made) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("how", [[], ["--dp=2"]], ids=["tensor-parallel", "dp-attention"])
def test_two_gpus(how: list[str], tmp_path: Path) -> None:
    ranks("--device=cuda", *how, work=tmp_path)
