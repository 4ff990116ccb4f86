"""Two ranks of the real server walk exactly, by tensor parallelism and DP attention; controls are in the report."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from demo_command import held

RELEASES = os.environ.get("RANKS_RELEASES", "0.5.12").split(",")


def ranks(*arguments: str, work: Path) -> dict[str, bool | None]:
    """Every check, by its name."""
    record = held("--tp=2", *arguments, work=work)
    assert record["tp"] == 2
    return {check["name"]: check["passed"] for check in record["releases"][0]["checks"]}


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_ranks(release: str, tmp_path: Path) -> None:
    made = ranks(f"--release={release}", work=tmp_path)
    assert sum("on rank 1 alone" in name for name in made) == 2
    assert [passed for name, passed in made.items() if "never answered" in name] == [True]


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_ranks_with_requests_of_their_own(release: str, tmp_path: Path) -> None:
    made = ranks("--dp=2", f"--release={release}", work=tmp_path)
    assert {f"walks on rank {rank} are exact while no other has requests" for rank in (0, 1)} <= made.keys()
    assert sum("on rank 1 alone" in name for name in made) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("how", [[], ["--dp=2"]], ids=["tensor-parallel", "dp-attention"])
def test_two_gpus(how: list[str], tmp_path: Path) -> None:
    ranks("--device=cuda", *how, work=tmp_path)
