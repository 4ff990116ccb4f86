"""The example that measures a decode step runs, on real classes, and its host rows are right in every way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "examples" / "scheduler_step" / "bench.py"


def test_it_measures(tmp_path: Path) -> None:
    options = ["--release", "0.5.12", "--batch", "2", "--rounds", "1", "--steps", "2", "--json", tmp_path / "record"]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (release,) = json.loads((tmp_path / "record").read_text())["releases"]
    assert release["sglang"] == "0.5.12" and release["wrong_rows"] == 0 < release["rows_checked"]
    ((cell),) = release["cells"]
    assert [*cell["ways"]] == ["SGLang", "index-upload, decode-memory"]
    assert all(len(times["host_us"]) == 3 for times in cell["ways"].values())
