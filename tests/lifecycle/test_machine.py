"""The state machine on every release: nothing is found with the plugin but what is known; the controls are found.

One process per release: unchanged, with the plugin in both modes, and with two planted bugs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from . import known, launch, register
from .process import MODES

SEQUENCES, STEPS, SEED = 60, 14, 2026
UNCHANGED, PLANTED = 30, 12
"""Sequences within which an unchanged release shows a defect, and any release a planted bug."""
BUGS = ("freed-twice", "corrupted-row")
SCRIPTS = sorted((Path(__file__).parent / "regressions").glob("*.txt"))


def _job() -> list[dict]:
    plugin = {"variant": "plugin", "sequences": SEQUENCES, "steps": STEPS, "seed": SEED}
    collect = plugin | {"sequences": UNCHANGED, "collect": True, "mode": "plain"}
    return [
        collect | {"variant": "off"},
        *(plugin | {"mode": mode} for mode in MODES),
        *(collect | {"sequences": PLANTED, "planted": bug} for bug in BUGS),
        *({"variant": "plugin", "mode": mode, "scripts": [path.read_text() for path in SCRIPTS]} for mode in MODES),
    ]


@cache
def _results(release: str) -> list[dict] | str:
    try:
        return launch.hunt(release, _job(), timeout=900)
    except launch.Ended as error:
        return str(error)


def results(release: str, **wanted: object) -> list[dict]:
    found = _results(release)
    if isinstance(found, str):
        pytest.fail(found)
    return [result for result in found if wanted.items() <= result.items()]


def each_release(test):
    cases = [pytest.param(r, id=r, marks=pytest.mark.xdist_group(f"machine-{r}")) for r in register.RELEASES]
    return pytest.mark.parametrize("release", cases)(test)


@each_release
def test_nothing_new_is_found(release: str) -> None:
    for result in results(release, variant="plugin", sequences=SEQUENCES):
        assert not result["failure"], "\n".join([*result["failure"][0], result["failure"][1]])
        assert result["played"] >= SEQUENCES


@each_release
def test_what_is_known_is_still_found(release: str) -> None:
    """So that an entry goes when its defect goes."""
    runs = results(release, variant="plugin", sequences=SEQUENCES)
    found = {name for result in runs for name in result["known"]}
    assert found == {entry.name for entry in known.KNOWN if release in entry.releases}


@each_release
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(release: str, bug: str) -> None:
    (result,) = results(release, planted=bug)
    wanted = known.PLANTED[bug]
    assert any(wanted in name for name in result["known"]), f"{wanted!r} was to be found, not only {result['known']}"


@each_release
def test_an_unchanged_release_shows_its_defects(release: str) -> None:
    (result,) = results(release, variant="off")
    missing = [kind for kind in known.UNCHANGED[release] if not any(kind in name for name in result["known"])]
    assert not missing, f"{missing} were to be found, not only {sorted(result['known'])}"


@each_release
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_regression(release: str, script: Path) -> None:
    for result in results(release, scripts=[path.read_text() for path in SCRIPTS]):
        found = result["found"][SCRIPTS.index(script)]
        assert not found, "\n".join(found)
