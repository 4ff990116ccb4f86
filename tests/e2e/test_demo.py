"""The demo as a user runs it: real servers over HTTP. Its own controls are part of what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "demo"]
WITH_HISPARSE = [
    "walks are exact without HiSparse",
    "the plugin is active in the server",
    "walks are exact with HiSparse, contexts 12x and 8x the hot buffer",
    "9 requests at once on 4 slots: all finish, all exact",
    "requests were retracted on the way",
    "control: one wrong host row in layer 0 breaks the walk where it is needed",
    "control: one wrong host row in layer 1 breaks the walk where it is needed",
    "pools are balanced at the end",
    "rows really came from the host",
]
PLUGIN_OFF = [
    "control: with the plugin off, retraction kills or corrupts",
    "control: with the plugin off, more requests than slots kill",
]
NEEDS_A_GPU = ["the plugin's swap-in kernel did the work", "walks are exact with SGLang's own swap-in kernel, too"]


def demo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, env=os.environ | env, timeout=900
    )


@pytest.mark.parametrize(("release", "defective"), [("0.5.10.post1", True), ("0.5.12", False), ("0.5.23", False)])
def test_every_claim_holds_on_a_release(release: str, defective: bool, tmp_path: Path) -> None:
    done = demo("--json", "--release", release, "--work-dir", str(tmp_path))
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)["releases"][0]
    outcomes = {check["name"]: check["passed"] for check in report["checks"]}
    expected = dict.fromkeys(WITH_HISPARSE, True) | dict.fromkeys(PLUGIN_OFF, True if defective else None)
    expected |= dict.fromkeys(NEEDS_A_GPU)
    assert outcomes == expected, json.dumps(report["checks"], indent=1)
    assert done.returncode == 0
    assert report["figures"]["retractions"] > 0
    assert report["figures"]["swap_in_misses"] > report["figures"]["swap_in_hits"]


@pytest.mark.gpu
def test_every_claim_holds_on_a_gpu(tmp_path: Path) -> None:
    done = demo("--json", "--device", "cuda", "--work-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_without_hisparse() -> None:
    done = demo("--release", "0.5.9")
    assert done.returncode == 2
    assert "SGLang 0.5.9 has no HiSparse" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_sglang_that_is_not_there(tmp_path: Path) -> None:
    done = demo("--sglang-path", str(tmp_path))
    assert done.returncode == 2
    assert "has no folder sglang/srt" in done.stderr


def test_a_release_that_cannot_be_fetched(tmp_path: Path) -> None:
    done = demo("--release", "0.0.1", PIP_NO_INDEX="1", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "no wheel of SGLang 0.0.1" in done.stderr
