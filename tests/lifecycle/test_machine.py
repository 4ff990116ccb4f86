"""The state machine on every release: nothing is found with the plugin but what is known; the controls are found.

One process per release: unchanged, with the plugin in both modes, and with two planted bugs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from . import known, launch, register

SEQUENCES, STEPS, SEED = 30, 14, 2026
UNCHANGED, PLANTED = 30, 10
"""Sequences within which an unchanged release shows its defects, and any release a planted bug."""
BUGS = ("freed-twice", "corrupted-row")
SCRIPTS = sorted((Path(__file__).parent / "regressions").glob("*.txt"))


def _job() -> list[dict]:
    hunt = {"sequences": SEQUENCES, "steps": STEPS, "seed": SEED}
    scripts = [path.read_text() for path in SCRIPTS]
    unchanged = hunt | {"sequences": UNCHANGED, "collect": True, "roomy": True}
    planted = [hunt | {"sequences": PLANTED, "collect": True, "planted": bug} for bug in BUGS]
    return [
        {"variant": "off", "mode": "plain", "hunts": [unchanged]},
        {"variant": "plugin", "mode": "plain", "hunts": [hunt, *planted], "scripts": scripts},
        {"variant": "plugin", "mode": "overlap", "hunts": [hunt], "scripts": scripts},
    ]


@cache
def _results(release: str) -> list[dict] | str:
    try:
        return launch.hunt(release, _job(), timeout=900)
    except launch.Ended as error:
        return str(error)


def results(release: str) -> tuple[dict, dict, dict]:
    """Of the schedulers without the plugin, with it, and with it and overlap."""
    found = _results(release)
    if isinstance(found, str):
        pytest.fail(found)
    off, plain, overlap = found
    return off, plain, overlap


def each_release(test):
    cases = [pytest.param(r, id=r, marks=pytest.mark.xdist_group(f"machine-{r}")) for r in register.PLAYED]
    return pytest.mark.parametrize("release", cases)(test)


@each_release
def test_nothing_new_is_found(release: str) -> None:
    for result in results(release)[1:]:
        hunt = result["hunts"][0]
        assert not hunt["failure"], "\n".join([*hunt["failure"][0], hunt["failure"][1]])
        assert hunt["played"] >= SEQUENCES


@each_release
def test_what_is_known_is_still_found(release: str) -> None:
    """So that an entry goes when its defect goes."""
    found = {name for result in results(release)[1:] for name in result["hunts"][0]["known"]}
    assert found == {entry.name for entry in known.KNOWN if release in entry.releases}


@each_release
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(release: str, bug: str) -> None:
    hunt = results(release)[1]["hunts"][1 + BUGS.index(bug)]
    wanted = known.PLANTED[bug]
    assert any(wanted in name for name in hunt["known"]), f"{wanted!r} was to be found, not only {hunt['known']}"


@each_release
def test_an_unchanged_release_shows_its_defects(release: str) -> None:
    found = results(release)[0]["hunts"][0]["known"]
    missing = [kind for kind in known.UNCHANGED[release] if not any(kind in name for name in found)]
    assert known.UNCHANGED[release] and not missing, f"{missing} were to be found, not only {sorted(found)}"


@each_release
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_regression(release: str, script: Path) -> None:
    for result in results(release)[1:]:
        found = result["found"][SCRIPTS.index(script)]
        assert not found, "\n".join(found)
