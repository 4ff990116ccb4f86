"""The example that measures a decode step runs, on real classes, and its host rows are right in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "examples" / "scheduler_step" / "bench.py"


@pytest.mark.parametrize("release", ["0.5.12", pytest.param("0.5.23", marks=pytest.mark.long)])
def test_it_measures(release: str, tmp_path: Path) -> None:
    options = ["--release", release, "--batch", "2", "--rounds", "1", "--steps", "2", "--json", tmp_path / "record"]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (measured,) = json.loads((tmp_path / "record").read_text())["releases"]
    assert measured["sglang"] == release and measured["wrong_rows"] == 0 < measured["rows_checked"]
    ((cell),) = measured["cells"]
    assert [*cell["ways"]] == ["SGLang", "index-upload, decode-memory"]
    assert all(len(times["host_us"]) == 3 for times in cell["ways"].values())
