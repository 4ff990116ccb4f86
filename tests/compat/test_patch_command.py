"""``sglang-hisparse patch`` on real releases: what it prints, writes and returns, and what it leaves alone."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hisparse_plugin import installation
from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.patching import series

from .conftest import OLD

Source = Callable[[str], Path]
COUNT = len(series.read(series.stored()[OLD]))


def test_list_is_what_is_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "list", "--json"]) == 0
    listed = {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)["patches"]}
    for release, folder in series.stored().items():
        for patch in series.read(folder):
            assert release in listed[patch.id]["releases"]
    fields = listed["retract-order"]
    assert fields["bug"].endswith("/22131")
    assert (fields["forwarded"], fields["applied_upstream"]) == ("not-needed", "0.5.11")
    assert main(["patch", "list"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in listed)


def test_verify_proves_every_series(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["series"]
    assert {entry["release"]: entry["source"] for entry in report} == {r: str(source(r)) for r in series.stored()}
    assert all(entry["patches"] and entry["mismatches"] == [] for entry in report)


def test_verify_takes_the_series_of_the_source_it_is_given(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "verify", "--sglang-path", str(source(OLD))]) == 0
    assert capsys.readouterr().out == f"{OLD}: {COUNT} patches, apply, compile, equal the overlays\n"


def test_the_series_serves_the_release_before_its_hotfix(source: Source) -> None:
    assert main(["patch", "verify", "--release", OLD, "--sglang-path", str(source("0.5.10"))]) == 0


def test_verify_reports_a_broken_patch(edited: Source, source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    patch = edited(OLD) / "direct-flag.patch"
    patch.write_text(patch.read_text().replace("-        req.staging = False", "-        req.staging = True"))
    assert main(["patch", "verify"]) == 1
    assert re.search(
        r"direct-flag: sglang/srt/managers/hisparse_coordinator.py:\d+: expected '        req.staging = True\\n', "
        r"found '        req.staging = False\\n'",
        capsys.readouterr().out,
    )


def test_verify_on_another_release_names_the_drift(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "verify", "--release", OLD, "--sglang-path", str(source("0.5.12"))]) == 1
    out = capsys.readouterr().out
    assert "tp-ready: sglang/srt/managers/hisparse_coordinator.py:" in out
    assert "the series is tp-ready" in out


def test_the_command_that_export_prints_patches_a_tree(
    copied: Source, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patch", "export", "--sglang-path", str(source(OLD)), "-o", str(tmp_path / "an output")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"Wrote {COUNT} patches for SGLang {OLD}")
    tree = copied(OLD)
    subprocess.run(printed[1], shell=True, cwd=tree, check=True)
    patches = series.read(series.stored()[OLD])
    expected = {change.path: change.after for step in series.steps(patches, source(OLD)) for change in step.changes}
    assert {path: (tree / path).read_text() for path in expected} == expected


def test_export_twice_is_the_same_and_an_edited_export_is_kept(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["patch", "export", "--sglang-path", str(source(OLD)), "-o", str(tmp_path)]
    assert main(arguments) == main(arguments) == 0
    (tmp_path / "direct-flag.patch").write_text("mine")
    assert main(arguments) == 2
    assert "has another direct-flag.patch" in capsys.readouterr().err
    assert (tmp_path / "direct-flag.patch").read_text() == "mine"


def test_export_from_a_fork_names_the_drift_and_the_remedy(
    copied: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = copied(OLD)
    file = tree / "sglang/srt/managers/hisparse_coordinator.py"
    theirs, ours = "if len(self.ack_staging_queue) == 0:", "if not self.ack_staging_queue:"
    file.write_text(file.read_text().replace(theirs, ours))
    assert main(["patch", "export", "--sglang-path", str(tree), "-o", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"hisparse_coordinator.py:253: expected '        {theirs}\\n', found '        {ours}\\n'" in error
    assert "git apply --3way" in error
    assert not (tmp_path / "out").exists()


def test_the_source_is_only_read(copied: Source, tmp_path: Path) -> None:
    """A site-packages that may not be written to is enough, and stays as it is."""
    tree = copied(OLD)
    own = [tree, *(p for p in tree.rglob("*") if not p.is_symlink())]
    before = {p: p.read_bytes() if p.is_file() else sorted(p.iterdir()) for p in own}
    for path in own:
        path.chmod(0o555)
    try:
        assert main(["patch", "verify", "--sglang-path", str(tree)]) == 0
        assert main(["patch", "export", "--sglang-path", str(tree), "-o", str(tmp_path / "out")]) == 0
        assert {p: p.read_bytes() if p.is_file() else sorted(p.iterdir()) for p in own} == before
    finally:
        for path in own:
            path.chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--sglang-path", "."], "has no folder sglang/srt"),
        (["export", "--sglang-path", "."], "has no folder sglang/srt"),
        (
            ["verify", "--release", "0.4.2"],
            "for SGLang 0.4.2; name one with --release: 0.5.10.post1",
        ),
        (["list", "--release", OLD], "unrecognized arguments"),
        ([], "required: ACTION"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert code(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_without_sglang_export_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(path: Path | None = None) -> installation.Installation:
        raise installation.NotInstalled("SGLang is not installed here")

    monkeypatch.setattr(installation, "find", absent)
    assert main(["patch", "export"]) == 2
    assert capsys.readouterr().err == "sglang-hisparse patch export: SGLang is not installed here\n"


def test_a_release_without_a_series_is_exit_code_2(source: Source, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patch", "export", "--sglang-path", str(source("0.5.12"))]) == 2
    assert "no series is stored for SGLang 0.5.12" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_exit_code_2(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["patch", "export", "--sglang-path", str(source(OLD)), "-o", str(tmp_path / "file" / "out")]) == 2
    assert "name another folder with -o" in capsys.readouterr().err


def code(arguments: list[str]) -> int | str | None:
    """Exit code of a command line that argparse may refuse."""
    try:
        return main(["patch", *arguments])
    except SystemExit as stop:
        return stop.code
