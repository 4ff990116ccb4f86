"""What a record says of the code and the driver that it was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sglang_hisparse_plugin import provenance


@pytest.mark.parametrize(
    ("script", "module", "found"),
    [
        ("echo 580.65.06; echo 580.65.06", "", "580.65.06"),
        ("exit 9", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26", "570.124.06"),
        ("exit 9", None, None),
    ],
)
def test_the_driver_is_what_the_machine_tells(
    script: str, module: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    if module is not None:
        (tmp_path / "version").write_text(module)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(provenance, "DRIVER_FILE", tmp_path / "version")
    assert provenance.driver() == found


def test_the_commit_is_that_of_the_checkout_itself(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    inside = tmp_path / "lib"
    inside.mkdir()
    assert provenance.commit(tmp_path) is None
    git("init", "-q")
    assert provenance.commit(tmp_path) is None, "no commit yet"
    git("commit", "-q", "--allow-empty", "-m", "x")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD")
    assert provenance.commit(inside) is None
