"""The support matrix is the record of the probes, and the record is what the probes say."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from sglang_hisparse_plugin import matrix
from sglang_hisparse_plugin.installation import find
from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching import series

Source = Callable[[str], Path]
RECORD: matrix.Record = json.loads((matrix.ROOT / "docs" / "matrix.json").read_text())


def test_every_release_since_hisparse_came_is_recorded() -> None:
    releases = [f"0.5.{n}" for n in range(9, 24)]
    assert [*RECORD] == sorted([*releases, "0.5.10.post1"], key=Version)
    assert set(matrix.TESTED) <= set(RECORD)
    assert all(re.fullmatch(r"[0-9a-f]{64}", entry["sha256"]) for entry in RECORD.values())


@pytest.mark.parametrize("release", matrix.TESTED)
def test_the_record_is_what_the_probes_say(release: str, source: Source) -> None:
    probed = matrix.probe(find(source(release)))
    assert {key: RECORD[release][key] for key in probed} == probed, (
        "python -m sglang_hisparse_plugin.matrix record WHEEL"
    )


def test_the_record_and_the_overlays_have_the_same_ids_in_the_same_order() -> None:
    for release, entry in RECORD.items():
        assert [*entry["overlays"]] == [overlay.id for overlay in OVERLAYS], release


def test_a_release_that_upstream_fixed_is_where_the_overlay_says() -> None:
    for overlay in OVERLAYS:
        outcomes = {release: entry["overlays"][overlay.id]["outcome"] for release, entry in RECORD.items()}
        last = max((i for i, outcome in enumerate(outcomes.values()) if outcome == "applied"), default=-1)
        fixed = [r for r, outcome in [*outcomes.items()][last + 1 :] if outcome == "upstream"]
        assert (fixed[0] if fixed else None) == overlay.fixed_since, overlay.id


def test_the_series_are_the_overlays_the_record_calls_applied() -> None:
    for release, folder in series.stored().items():
        outcomes = RECORD[release]["overlays"]
        applied = [o.id for o in OVERLAYS if outcomes[o.id]["outcome"] == "applied" and not o.no_diff]
        assert [patch.id for patch in series.read(folder)] == applied


def test_nothing_is_refused_on_a_released_sglang() -> None:
    refused = [(r, name) for r, e in RECORD.items() for name, f in e["overlays"].items() if f["outcome"] == "refused"]
    assert not refused


def test_readme_and_docs_show_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["check"]) == 0, capsys.readouterr().err


def test_a_changed_table_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("README.md", "docs/matrix.json", "docs/matrix.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(matrix.ROOT / name, tmp_path / name)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.main(["check"]) == 0
    page = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(page.replace("`retract-order`, ", ""))
    assert matrix.main(["check"]) == 1
    assert matrix.main(["write"]) == 0
    assert (tmp_path / "README.md").read_text() == page


def test_recording_a_wheel_gives_what_is_recorded(source: Source, tmp_path: Path) -> None:
    """From a wheel packed anew out of what the release holds, so all but its name and digest must agree."""
    release = "0.5.10.post1"
    wheel = tmp_path / f"sglang-{release}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in [*source(release).rglob("*.py"), *source(release).glob("*.dist-info/METADATA")]:
            archive.write(path, path.relative_to(source(release)))
    [entry] = matrix.record([wheel], {}).values()
    assert {**entry, "sha256": ""} == {**RECORD[release], "sha256": ""}
