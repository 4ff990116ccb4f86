"""Diffs are applied exactly or not at all, and what is written out again is taken by git and by patch."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hisparse_plugin.patching import patchfile, series
from sglang_hisparse_plugin.patching.patchfile import Drift, PatchError, blob_id

HEADER = """\
Description: Give the right answer
 The old one was off by one.
Origin: vendor
Bug: https://example.org/1
Forwarded: no
Last-Update: 2026-11-30
"""
BEFORE = {"pkg/a.py": "def f():\n    x = 1\n    return x\n", "pkg/b.py": "B = 1\n", "pkg/sub/c.py": "C = 1\n"}
ONE = {"pkg/a.py": "def f():\n    x = 2\n    return x\n"}
TWO = {"pkg/a.py": "def f():\n    x = 2\n    x += 1\n    return x\n", "pkg/b.py": "A = 0\nB = 1\n"}


def diff(before: str, after: str, path: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}", n=0)
    head = f"diff --git a/{path} b/{path}\nindex {blob_id(before)[:12]}..{blob_id(after)[:12]} 100644\n"
    return head + "".join(lines)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, newline="")
    return folder


def snapshot(folder: Path) -> dict[str, str]:
    found = [Path(at, name) for at, _, names in os.walk(folder, followlinks=True) for name in names]
    return {p.relative_to(folder).as_posix(): p.read_text() for p in found}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", BEFORE)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Two patches, the second made for the result of the first; one file is only added to."""
    middle = BEFORE | ONE
    return write(
        tmp_path / "stored",
        {
            "series": "one.patch\ntwo.patch\n",
            "one.patch": HEADER + "\n" + "".join(diff(BEFORE[p], ONE[p], p) for p in ONE),
            "two.patch": HEADER + "\n" + "".join(diff(middle[p], TWO[p], p) for p in TWO),
        },
    )


def test_apply_makes_a_patched_package_and_leaves_the_source_alone(source: Path, stored: Path, tmp_path: Path) -> None:
    assert series.apply(stored, source, tmp_path / "into") == ["one", "two"]
    assert snapshot(tmp_path / "into") == BEFORE | TWO
    assert snapshot(source) == BEFORE
    code = "import pkg.a, pkg.b, pkg.sub.c as c; print(pkg.a.f(), pkg.b.A, c.C)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "into"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).split() == ["3", "0", "1"]


def test_a_read_only_source_is_enough(source: Path, stored: Path, tmp_path: Path) -> None:
    for path in [source, *source.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    series.apply(stored, source, tmp_path / "into")
    assert snapshot(tmp_path / "into") == BEFORE | TWO


@pytest.mark.parametrize("command", [["git", "apply"], ["patch", "-p1", "--fuzz=0", "-i"]], ids=["git", "patch"])
def test_what_is_written_out_is_taken_by_others(source: Path, stored: Path, tmp_path: Path, command: list[str]) -> None:
    for step in list(series.steps(series.read(stored), source)):
        out = tmp_path / f"{step.patch.id}.patch"
        out.write_text(patchfile.with_context(step.patch, step.changes))
        assert out.read_text().startswith(HEADER)
        subprocess.run([*command, out], cwd=source, check=True, capture_output=True)
    assert snapshot(source) == BEFORE | TWO


def test_drift_names_file_line_expected_and_found(source: Path, stored: Path) -> None:
    write(source, {"pkg/a.py": "def f():\n    x = 7\n    return x\n"})
    with pytest.raises(Drift) as caught:
        list(series.steps(series.read(stored), source))
    assert str(caught.value) == r"one: pkg/a.py:2: expected '    x = 1\n', found '    x = 7\n'"


def test_a_change_elsewhere_in_the_file_is_no_drift_for_a_hunk_that_has_text_to_match(
    source: Path, stored: Path
) -> None:
    write(source, {"pkg/a.py": "def f():\n    x = 1\n    return x  # ours\n"})
    one = next(series.steps(series.read(stored)[:1], source))
    assert one.changes[0].after == "def f():\n    x = 2\n    return x  # ours\n"


def test_a_change_elsewhere_is_drift_for_a_hunk_that_only_adds(source: Path, stored: Path) -> None:
    write(source, {"pkg/b.py": "B = 2\n"})
    with pytest.raises(Drift, match=r"two: pkg/b\.py:0: expected a file with blob id") as caught:
        list(series.steps(series.read(stored), source))
    assert (caught.value.expected[-12:], caught.value.found) == (blob_id(BEFORE["pkg/b.py"])[:12], blob_id("B = 2\n"))


def test_a_missing_file_is_drift(source: Path, stored: Path) -> None:
    (source / "pkg/b.py").unlink()
    with pytest.raises(Drift, match=r"two: pkg/b\.py:1: expected a file"):
        list(series.steps(series.read(stored), source))


def test_a_patch_applied_twice_is_drift(source: Path, stored: Path, tmp_path: Path) -> None:
    series.apply(stored, source, tmp_path / "into")
    with pytest.raises(Drift):
        series.apply(stored, tmp_path / "into", tmp_path / "again")


def test_a_result_that_does_not_compile_is_refused(source: Path, stored: Path) -> None:
    after = "def f():\n    x = (\n    return x\n"
    write(stored, {"one.patch": HEADER + "\n" + diff(BEFORE["pkg/a.py"], after, "pkg/a.py")})
    with pytest.raises(PatchError, match=r"one: pkg/a\.py:2: does not compile"):
        list(series.steps(series.read(stored), source))


def test_an_added_line_edited_by_hand_is_noticed(source: Path, stored: Path) -> None:
    patch = stored / "one.patch"
    patch.write_text(patch.read_text().replace("+    x = 2", "+    x = 3"))
    with pytest.raises(PatchError, match=r"one: pkg/a\.py: the result has blob id"):
        list(series.steps(series.read(stored), source))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Bug: https://example.org/1\n", "", "lacks Bug"),
        ("@@ -2 +2 @@", "@@ -2,2 +2 @@", "shorter than expected"),
        ("-    x = 1\n", "", "shorter than expected"),
        ("-    x = 1\n", "     x = 1\n", "Hunk|context"),
        ("index ", "index: ", "no `index` line"),
        ("index ", "new file mode 100644\nindex ", "not create"),
        ("index ", "deleted file mode 100644\nindex ", "not create|Target without source"),
        ("diff --git", "diff", "changes nothing"),
    ],
)
def test_a_malformed_patch_is_refused(source: Path, stored: Path, old: str, new: str, message: str) -> None:
    patch = stored / "one.patch"
    assert old in patch.read_text()
    patch.write_text(patch.read_text().replace(old, new))
    with pytest.raises(PatchError, match=message):
        list(series.steps(series.read(stored), source))


@pytest.mark.parametrize("ids", ["one.patch\n", "one.patch\ntwo.patch\nthree.patch\n"], ids=["left out", "missing"])
def test_series_and_patch_files_must_agree(stored: Path, ids: str) -> None:
    (stored / "series").write_text(ids)
    with pytest.raises(PatchError, match="disagree about t"):
        series.read(stored)


def test_stored_finds_the_series_of_this_checkout() -> None:
    folders = series.stored()
    assert folders, "no series found beside the package"
    assert all((folder / "series").is_file() for folder in folders.values())


line = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=4)
texts = st.lists(line, max_size=12).map(lambda lines: "".join(f"# {n}\n" for n in lines))


@given(before=texts.filter(bool), after=texts)
def test_applying_gives_the_text_the_diff_was_made_from(before: str, after: str) -> None:
    """Against difflib, for any two texts: form feeds and other things that only look like line ends included."""
    if before == after:
        return
    split = patchfile._lines
    hunks = difflib.unified_diff(split(before), split(after), "a/x.txt", "b/x.txt", n=0)
    head = f"diff --git a/x.txt b/x.txt\nindex {blob_id(before)}..{blob_id(after)} 100644\n"
    patch = patchfile.parse("x", HEADER + "\n" + head + "".join(hunks))
    assert patchfile.change(patch, patch.files[0], before).after == after
