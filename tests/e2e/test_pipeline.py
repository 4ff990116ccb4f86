"""Two pipeline stages of the real server: exact walks, memory for a few, retractions, aborts, balanced pools."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import checks, language, manners, model, releases, scales, setup
from sglang_hisparse_plugin.demo.report import Report

RELEASES = os.environ.get("RANKS_RELEASES", "0.5.12").split(",")
SCALE = replace(scales.CPU, device_tokens=1536, slots=8, long=(1200, 1000), crowd_size=10, patience=600)
ABORTED = 8


@pytest.mark.long
@pytest.mark.parametrize("release", RELEASES)
def test_two_stages(release: str, tmp_path: Path) -> None:
    weights, report = tmp_path / "model", Report(release, print)
    model.write(weights, SCALE.dims)
    target = setup.Target(release, releases.fetch(release))
    launcher = setup.Launcher(target, SCALE, weights, tmp_path, print, pp=2)
    with launcher.server("two-stages", retract=True) as server:
        checks.with_plugin(launcher, report, server, "two stages")
        clients = [server.client(language.prompt(700, seed=i), 200) for i in range(ABORTED)]
        with ThreadPoolExecutor(ABORTED) as pool:
            ends = [pool.submit(manners.abort_soon, client, random.Random(i)) for i, client in enumerate(clients)]
        outcomes = [end.result() for end in ends]
        assert set(outcomes) <= {"aborted", "exact"} and "aborted" in outcomes, outcomes
        checks.pools_balance(report, server, "pools of both stages are balanced after aborts")
    assert report.passed, [str(check) for check in report.checks if check.passed is False]
    balanced = [check.detail for check in report.checks if "balanced" in check.name]
    assert len(balanced) == 2 and all("device slots of stage 1" in detail for detail in balanced)
