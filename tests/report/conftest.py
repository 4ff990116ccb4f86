"""A report as the command writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import RECORD, ROW

from sglang_hisparse_plugin.cli import main


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report as the command writes it."""
    folder = tmp_path_factory.mktemp("report")
    engine = folder / "run.json"
    engine.write_text(json.dumps({"device": "NVIDIA H200", "rows": [ROW, {**ROW, "kernel": "sglang", "note": "slow"}]}))
    assert main(["bench", f"--from={RECORD}", f"--engine={engine}", f"--report={folder / 'out'}"]) == 0
    return folder / "out"


@pytest.fixture(scope="session")
def html(folder: Path) -> str:
    return (folder / "index.html").read_text("utf-8")
