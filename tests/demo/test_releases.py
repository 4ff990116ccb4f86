"""Fetching a release: from the cache, from an index, from several processes at once, and not at all."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import releases

RELEASE = "9.9.9"
FETCH = f"from sglang_hisparse_plugin.demo import releases; print(releases.fetch({RELEASE!r}))"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel in place of an index, and a cache of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / f"sglang-{RELEASE}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sglang/srt/__init__.py", "")
        info = f"sglang-{RELEASE}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {RELEASE}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(releases.OVERRIDE, raising=False)
    return folder


def test_a_wheel_is_fetched_once(index: Path) -> None:
    found = releases.fetch(RELEASE)
    assert found == releases.cache_dir() / RELEASE
    assert (found / "sglang" / "srt").is_dir()
    next(index.iterdir()).unlink()
    assert releases.fetch(RELEASE) == found, "the second time needs no index"


def test_processes_that_fetch_at_once_agree(index: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate()[0].strip() for process in processes}
    assert found == {str(releases.cache_dir() / RELEASE)}
    assert [path.name for path in releases.cache_dir().iterdir()] == [RELEASE], "no half of anything is left"


def test_a_release_that_is_not_there_names_the_remedy(index: Path) -> None:
    with pytest.raises(releases.ReleaseUnavailable, match=r"SGLang 1\.2\.3.*pip's index.*SGLANG_HISPARSE_WHEELS"):
        releases.fetch("1.2.3")
    assert not any(releases.cache_dir().iterdir())


@pytest.mark.parametrize("release", ["", "../../etc", "/etc", "latest", "0.5.x"])
def test_what_is_no_version_is_refused(index: Path, release: str) -> None:
    with pytest.raises(releases.ReleaseUnavailable, match="is no release of SGLang; give its version"):
        releases.fetch(release)


def test_a_cache_that_cannot_be_written_to_names_the_remedy(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    with pytest.raises(releases.ReleaseUnavailable, match=r"/proc/nope.*set XDG_CACHE_HOME to a folder"):
        releases.fetch(RELEASE)


def test_a_broken_wheel_is_said_to_be_one(index: Path) -> None:
    next(index.iterdir()).write_bytes(b"no zip file")
    with pytest.raises(releases.ReleaseUnavailable, match=RELEASE):
        releases.fetch(RELEASE)


def test_an_index_out_of_reach(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(releases.ReleaseUnavailable, match="index cannot be reached; check the network"):
        releases.fetch("0.5.12")


def test_given_folders_are_used_as_they_are(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / RELEASE / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setenv(releases.OVERRIDE, str(tmp_path / "mine"))
    assert releases.fetch(RELEASE) == tmp_path / "mine" / RELEASE
    assert releases.fetch(RELEASE) != releases.cache_dir() / RELEASE
