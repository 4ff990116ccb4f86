"""Every claim of the demo, on real servers over HTTP. Its own controls are part of what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_command import WITH_HISPARSE, held, refused

PLUGIN_OFF = [
    "control: with the plugin off, retraction kills or corrupts",
    "control: with the plugin off, more requests than slots kill",
]
NEEDS_A_GPU = ["the plugin's swap-in kernel did the work", "walks are exact with SGLang's own swap-in kernel, too"]


@pytest.mark.parametrize(("release", "defective"), [("0.5.10.post1", True), ("0.5.12", False), ("0.5.23", False)])
def test_every_claim_holds_on_a_release(release: str, defective: bool, tmp_path: Path) -> None:
    report = held("--release", release, work=tmp_path)["releases"][0]
    outcomes = {check["name"]: check["passed"] for check in report["checks"]}
    expected = dict.fromkeys(WITH_HISPARSE, True) | dict.fromkeys(PLUGIN_OFF, True if defective else None)
    assert outcomes == expected | dict.fromkeys(NEEDS_A_GPU)
    assert report["figures"]["retractions"] > 0
    assert report["figures"]["swap_in_misses"] > report["figures"]["swap_in_hits"]


@pytest.mark.gpu
def test_every_claim_holds_on_a_gpu(tmp_path: Path) -> None:
    held("--device", "cuda", work=tmp_path)


def test_a_release_without_hisparse() -> None:
    assert "SGLang 0.5.9 has no HiSparse" in refused("--release", "0.5.9")


def test_an_sglang_that_is_not_there(tmp_path: Path) -> None:
    assert "has no folder sglang/srt" in refused("--sglang-path", str(tmp_path))


def test_a_release_that_cannot_be_fetched(tmp_path: Path) -> None:
    said = refused("--release", "0.0.1", PIP_NO_INDEX="1", XDG_CACHE_HOME=str(tmp_path))
    assert "no wheel of SGLang 0.0.1" in said
