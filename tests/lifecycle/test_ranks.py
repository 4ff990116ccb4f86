"""Ranks that share requests let the same ones decode in the same iteration, whenever their transfers end; and under
DP attention, where each rank or pair has its own, nobody waits for a rank that is not concerned.

RANKS_RELEASES names the releases; the functions in question are the same text in all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.patching import series

from . import launch, register

HERE = Path(__file__).parent
RELEASES = os.environ.get("RANKS_RELEASES", "0.5.23").split(",")
PATCHED = [release for release in RELEASES if release in series.stored()]


def _ranks(release: str, variant: str, story: str, scratch: Path) -> dict:
    sglang = releases.fetch(release)
    if variant == "patched":
        series.apply(series.stored()[release], sglang, scratch / "patched")
        sglang = scratch / "patched"
    env = launch.environment(sglang, "strict" if variant == "plugin" else "off", TMPDIR=tempfile.mkdtemp(dir=scratch))
    command = [sys.executable, "-m", f"{__package__}.ranks", variant, story]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    told = json.loads(lines[0])
    assert told["started"] == [*range(len(told["answers"]))], done.stderr[-4000:]
    return told["answers"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_queue_empty_on_one_rank_hangs_both_when_nothing_is_patched(release: str, tmp_path: Path) -> None:
    assert _ranks(release, "off", "empty-on-one", tmp_path) == [None, None]


@pytest.mark.parametrize(
    ("release", "variant"), [*((r, "plugin") for r in RELEASES), *((r, "patched") for r in PATCHED)]
)
@pytest.mark.parametrize("story", ["different-ends", "empty-on-one"])
def test_ranks_agree(release: str, variant: str, story: str, tmp_path: Path) -> None:
    zero, one = _ranks(release, variant, story, tmp_path)
    assert zero and one, "a rank did not come to an end"
    assert zero["findings"] == one["findings"] == []
    assert zero["decoded"] == one["decoded"]


@pytest.mark.parametrize("release", RELEASES)
def test_with_dp_attention_each_rank_has_its_own_requests(release: str, tmp_path: Path) -> None:
    answers = _ranks(release, "plugin", "own-requests", tmp_path)
    assert answers == [{"findings": []}] * 2


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("story", ["pairs", "pairs-of-context"])
def test_with_dp_attention_ranks_that_share_requests_vote_and_no_others(
    release: str, story: str, tmp_path: Path
) -> None:
    _expect_pairs_agree(_ranks(release, "plugin", story, tmp_path))


@pytest.mark.skipif(not register.ALL_ASKED, reason="make every-release: the plugin's run is in every suite")
@pytest.mark.parametrize("release", PATCHED)
def test_patched_ranks_that_share_context_agree(release: str, tmp_path: Path) -> None:
    _expect_pairs_agree(_ranks(release, "patched", "pairs-of-context", tmp_path))


@pytest.mark.skipif(not register.ALL_ASKED, reason="make every-release")
@pytest.mark.parametrize("release", RELEASES)
def test_ranks_that_share_context_part_when_nothing_is_patched(release: str, tmp_path: Path) -> None:
    one, other, *_ = _ranks(release, "off", "pairs-of-context", tmp_path)
    assert not one or not other or one["decoded"] != other["decoded"]


def _expect_pairs_agree(answers: list[dict]) -> None:
    assert all(answers), "a rank did not come to an end"
    assert [told["findings"] for told in answers] == [[]] * 4
    for one, other in (answers[:2], answers[2:]):
        assert one["decoded"] == other["decoded"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_slow_transfer_on_one_stage_hangs_both_when_nothing_is_patched(release: str, tmp_path: Path) -> None:
    assert _ranks(release, "off", "slow-on-one", tmp_path) == [None, None]


@pytest.mark.parametrize(
    ("release", "variant"), [*((r, "plugin") for r in RELEASES), *((r, "patched") for r in PATCHED)]
)
def test_pipeline_stages_agree(release: str, variant: str, tmp_path: Path) -> None:
    first, last = _ranks(release, variant, "stages", tmp_path)
    assert first and last, "a stage did not come to an end"
    assert first["findings"] == last["findings"] == []
    assert first["decoded"] == last["decoded"]
    assert all(iterations for told in first["decoded"].values() for iterations in told.values())
