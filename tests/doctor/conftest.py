"""What the tests of the doctor look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from machine import DSA, RELEASE

from sglang_hisparse_plugin.demo import releases


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The folder of an unpacked SGLang, the real one."""
    return releases.fetch(RELEASE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DSA))
    return folder
