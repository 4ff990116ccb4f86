"""Draft tokens on the real coordinator, allocators and pools of each release: every row is what was written for it.

One process per release runs all cases, each in a fork of a scheduler that has just started (`process.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest
from lifecycle import launch

from sglang_hisparse_plugin.demo import releases

RELEASES = ("0.5.10.post1", "0.5.11", "0.5.12", "0.5.15")
if os.environ.get("EVERY_RELEASE"):
    RELEASES += ("0.5.10", "0.5.13", "0.5.14")
TIMEOUT_S = 600
DRAFTS, SEEDS = (2, 3, 4), (0, 1)
EXACT = [f"random-{n}-drafts-{seed}" for n in DRAFTS for seed in SEEDS] + [
    "about-the-hot-buffer",
    "full",
    "leaving",
    "gone",
    "addresses",
    "single-steps",
]
#: what a case must have come across
MET = {"about-the-hot-buffer": ("boundary",), "leaving": ("boundary", "reused", "aborted")}
CONTROLS = {
    "control-host-row": "reads wrong rows for [5]",
    "control-no-settle": "reads wrong rows",
    "control-not-told": "free at the end",
    "control-wrong-home": "reads wrong rows",
    "control-too-many": "reads wrong rows",
}


@cache
def _results(release: str) -> dict[str, dict] | str:
    """What all cases found, from one process; a text if it did not get that far."""
    sglang = releases.fetch(release)
    environment = launch.environment(sglang, "strict")
    command = [sys.executable, "-m", "speculative.process"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        return f"the scheduler of {release} did not start:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return json.loads(lines[0])


def _case(release: str, name: str) -> dict:
    results = _results(release)
    if isinstance(results, str):
        pytest.fail(results)
    assert results[name], "the process ended in the middle of the case"
    return results[name]


def _cases(names: list[str]) -> list:
    return [
        pytest.param(release, name, id=f"{release}-{name}", marks=pytest.mark.xdist_group(f"speculative-{release}"))
        for release in RELEASES
        for name in names
    ]


@pytest.mark.parametrize(("release", "name"), _cases(EXACT))
def test_every_row_is_what_was_written_for_its_token(release: str, name: str) -> None:
    result = _case(release, name)
    assert not result["found"], "\n".join(result["found"])
    assert result["answered"] > (15_000 if name.startswith("random") else 500)
    assert all(result[what] for what in MET.get(name, ()))


@pytest.mark.parametrize(("release", "name"), _cases([*CONTROLS]))
def test_what_is_wrong_is_seen(release: str, name: str) -> None:
    result = _case(release, name)
    assert not result["before"]
    assert any(CONTROLS[name] in text for text in result["found"]), result["found"]
