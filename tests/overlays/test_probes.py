"""Each probe recognises each release, finds the fix in the patched source, and does not guess at a fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching import series
from sglang_hisparse_plugin.patching.outcome import Absent, Defective, Fixed, Unknown
from sglang_hisparse_plugin.patching.source import SourceTree

from .forks import ADDED, FORKS, NEW, OLD, Fork
from .verdicts import RELEASES, VERDICTS

KINDS = {"D": Defective, "F": Fixed, "-": Absent}
BY_ID = {overlay.id: overlay for overlay in OVERLAYS}


def test_the_table_names_every_overlay() -> None:
    assert set(BY_ID) <= {name.strip() for name in VERDICTS}


@pytest.mark.parametrize(
    ("name", "release", "letter"),
    [
        (name.strip(), release, letter)
        for name, row in VERDICTS.items()
        for release, letter in zip(RELEASES, row.split(), strict=True)
        if name.strip() in BY_ID
    ],
)
def test_release(name: str, release: str, letter: str) -> None:
    overlay, tree = BY_ID[name], SourceTree(fetch(release))
    verdict = overlay.probe(tree)
    assert isinstance(verdict, KINDS[letter]), verdict
    if letter == "D":
        for hook in overlay.hooks(tree):
            assert tree.function(*hook.target.split(":")), f"{hook.target} does not exist"


@pytest.mark.parametrize("release", series.stored())
def test_patched_source_is_fixed(release: str, tmp_path: Path) -> None:
    """The diffs make of a defective release one that the probes call fixed."""
    applied = series.apply(series.stored()[release], fetch(release), tmp_path / "patched")
    tree = SourceTree(tmp_path / "patched")
    verdicts = {name: BY_ID[name].probe(tree) for name in applied}
    assert all(isinstance(verdict, Fixed) for verdict in verdicts.values()), verdicts


@pytest.mark.parametrize("fork", FORKS, ids=lambda fork: f"{fork.overlay}-{fork.what.replace(' ', '-')}")
def test_fork_is_not_guessed_at(fork: Fork, tmp_path: Path) -> None:
    source = fetch(fork.release)
    function = SourceTree(source).function(fork.module, fork.function)
    assert function is not None and function.node.end_lineno is not None
    lines = function.path.read_text("utf-8").splitlines(keepends=True)
    first, last = function.node.lineno - 1, function.node.end_lineno
    body = "".join(lines[first:last])
    assert fork.old in body
    body = body.replace(fork.old, fork.new, 1)
    if fork.old_too:
        assert fork.old_too in body
        body = body.replace(fork.old_too, fork.new_too, 1)
    text = "".join([*lines[:first], body, *lines[last:]])
    series.lay_over(source, {str(function.path.relative_to(source)): text}, tmp_path / "fork")
    verdict = BY_ID[fork.overlay].probe(SourceTree(tmp_path / "fork"))
    assert isinstance(verdict, Unknown), verdict
    assert fork.named in verdict.found + verdict.expected, verdict


@pytest.mark.parametrize("what", ADDED)
def test_a_method_replaced_later_is_not_guessed_at(what: str, tmp_path: Path) -> None:
    added, named = ADDED[what]
    source, path = fetch(OLD), "sglang/srt/managers/schedule_batch.py"
    series.lay_over(source, {path: (source / path).read_text("utf-8") + added}, tmp_path / "fork")
    verdict = BY_ID["retract-order"].probe(SourceTree(tmp_path / "fork"))
    assert isinstance(verdict, Unknown) and named in verdict.found + verdict.expected, verdict


def test_a_guard_of_its_own_is_a_fix(tmp_path: Path) -> None:
    """The control to the early returns that are none."""
    source, path = fetch(OLD), "sglang/srt/managers/hisparse_coordinator.py"
    text = (source / path).read_text("utf-8")
    branch = "        if req.hisparse_staging:\n            self.abort_staging_request(req)"
    assert text.count(branch) == 1
    guard = "        if self.frozen or req.finished():\n            return\n"
    series.lay_over(source, {path: text.replace(branch, guard + branch)}, tmp_path / "fork")
    assert isinstance(BY_ID["retract-once"].probe(SourceTree(tmp_path / "fork")), Fixed)


@pytest.mark.parametrize("release", [OLD, NEW])
def test_a_coordinator_that_moved_is_not_a_lack_of_hisparse(release: str, tmp_path: Path) -> None:
    source, path = fetch(release), "sglang/srt/managers/hisparse_coordinator.py"
    series.lay_over(source, {path: ""}, tmp_path / "fork")
    (tmp_path / "fork" / path).rename(tmp_path / "fork/sglang/srt/managers/sparse.py")
    verdicts = [overlay.probe(SourceTree(tmp_path / "fork")) for overlay in OVERLAYS]
    assert all(isinstance(v, Unknown) and "HiSparseCoordinator" in v.expected for v in verdicts), verdicts


def _tree(root: Path, files: dict[str, str]) -> SourceTree:
    for name, text in files.items():
        path = root / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SourceTree(root)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"managers/scheduler.py": ""},
        {"server_args.py": "enable_hisparse: bool = False"},
        {"server_args.py": "", "arg_groups/fields/memory.py": "enable_hisparse: bool = ("},
        {"server_args.py": "", "managers/hisparse_coordinator.py": ""},
    ],
    ids=["empty", "no arguments", "flag", "flag in a broken file", "no class"],
)
def test_a_lack_of_hisparse_is_not_concluded_from_little(files: dict[str, str], tmp_path: Path) -> None:
    verdicts = [overlay.probe(_tree(tmp_path, files)) for overlay in OVERLAYS]
    assert all(isinstance(v, Unknown) and "HiSparseCoordinator" in v.expected for v in verdicts), verdicts


def test_a_lack_of_hisparse(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {"server_args.py": "not_enable_hisparse_but = 1", "arg_groups/broken.py": "def ("})
    assert all(isinstance(overlay.probe(tree), Absent) for overlay in OVERLAYS)
