"""Sources of released SGLang wheels. A release that cannot be fetched fails the tests that need it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.patching import series

OLD = "0.5.10.post1"


@pytest.fixture(scope="session")
def source() -> Callable[[str], Path]:
    """The folder with the unpacked wheel of a release; only to be read."""
    return fetch


@pytest.fixture
def copied(tmp_path: Path, source: Callable[[str], Path]) -> Callable[[str], Path]:
    """A tree of a release that may be changed, in so far as its series does: those files are copies, the rest links."""

    def copy(release: str) -> Path:
        into, patches = tmp_path / f"sglang-{release}", series.read(series.stored()[release])
        paths = {file.path for patch in patches for file in patch.files}
        series.lay_over(source(release), dict.fromkeys(paths, ""), into)
        for path in paths:
            shutil.copyfile(source(release) / path, into / path)
        return into

    return copy


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A copy of the stored series of a release, to be edited; the command line takes it for the only stored one."""

    def edit(release: str) -> Path:
        folder = shutil.copytree(series.stored()[release], tmp_path / "edited")
        monkeypatch.setattr(series, "stored", lambda: {release: folder})
        return folder

    return edit
