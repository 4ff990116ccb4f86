"""Prefill and decode on two real servers; the controls are part of what the demo reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from demo_command import held, refused

RELEASES = os.environ.get("PD_RELEASES", "0.5.12").split(",")


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_servers(release: str, tmp_path: Path) -> None:
    checks = held("--pd", f"--release={release}", work=tmp_path)["releases"][0]["checks"]
    assert checks[0]["passed"], f"{checks[0]['detail']} `make long` and `make pd` install it for themselves."
    assert sum(check["passed"] is None for check in checks) <= 1, "only KV may come too late on a slow machine"


@pytest.mark.gpu
def test_two_servers_on_one_gpu(tmp_path: Path) -> None:
    held("--pd", "--device=cuda", work=tmp_path)


@pytest.mark.parametrize("arguments", [["--speculative"], ["--load=5"], ["--tp=2"]])
def test_wrong_use(arguments: list[str]) -> None:
    assert "--pd is a set of checks of its own" in refused("--pd", *arguments)
