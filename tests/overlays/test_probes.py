"""Each probe recognises each release, finds the fix in the patched source, and does not guess at a fork."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.overlays import OVERLAYS
from sglang_hisparse_plugin.patching import series
from sglang_hisparse_plugin.patching.outcome import Absent, Defective, Fixed, Unknown
from sglang_hisparse_plugin.patching.source import SourceTree

from .forks import FORKS, Fork
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
    text = "".join([*lines[:first], body.replace(fork.old, fork.new, 1), *lines[last:]])
    series.lay_over(source, {str(function.path.relative_to(source)): text}, tmp_path / "fork")
    verdict = BY_ID[fork.overlay].probe(SourceTree(tmp_path / "fork"))
    assert isinstance(verdict, Unknown), verdict
    assert fork.named in verdict.found + verdict.expected, verdict
