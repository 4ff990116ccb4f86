"""The state machine on every release: nothing is found with the plugin but what is known; the controls are found.

One process per release: unchanged, with the plugin in both modes, as a decode worker, and with planted bugs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from . import conftest, known, launch, register

SEQUENCES, STEPS, SEED = 500, 10, 2026
"""Different sequences that come to their end, for each way to run."""
UNCHANGED, PLANTED, LONGER = 30, 20, 14
"""Sequences within which an unchanged release shows its defects, and any release a planted bug; and their steps."""
BUGS = tuple(known.PLANTED)
WAYS = ("plain", "overlap", "decode-overlap", *(["decode-plain"] if register.ALL_ASKED else []))
"""To run with the plugin; those of decode workers play scripts of their own."""
FOLDER = Path(__file__).parent / "regressions"
SCRIPTS = {way: sorted((FOLDER / ("decode" if "decode" in way else "")).glob("*.txt")) for way in WAYS}
OFF = ("plain", "decode-plain")


def _job() -> list[dict]:
    every = {"steps": LONGER, "seed": SEED, "collect": True}
    unchanged = every | {"sequences": UNCHANGED, "roomy": True}
    planted = [every | {"sequences": PLANTED, "planted": bug} for bug in BUGS]
    hunt = {"ended": SEQUENCES, "steps": STEPS, "seed": SEED}
    return [
        *({"variant": "off", "mode": mode, "hunts": [unchanged]} for mode in OFF),
        *(
            {
                "variant": "plugin",
                "mode": way,
                "hunts": [hunt, *(planted if way in {"plain", "decode-overlap"} else [])],
                "scripts": [script.read_text() for script in SCRIPTS[way]],
            }
            for way in WAYS
        ),
    ]


@cache
def _results(release: str) -> list[dict] | str:
    try:
        return launch.hunt(release, _job(), timeout=1500)
    except launch.Ended as error:
        return str(error)


def results(release: str, variant: str, way: str) -> dict:
    """Of one scheduler."""
    found = _results(release)
    if isinstance(found, str):
        pytest.fail(found)
    (result,) = [result for result in found if (result["variant"], result["mode"]) == (variant, way)]
    return result


def each_release(test):
    cases = [pytest.param(r, id=r, marks=pytest.mark.xdist_group(f"machine-{r}")) for r in register.PLAYED]
    return pytest.mark.parametrize("release", cases)(test)


@each_release
@pytest.mark.parametrize("way", WAYS)
def test_nothing_new_is_found(release: str, way: str, record_property) -> None:
    """And so many were played: different scripts that the server came to rest after, as counted where they ended."""
    hunt = results(release, "plugin", way)["hunts"][0]
    assert not hunt["failure"], "\n".join([*hunt["failure"][0], hunt["failure"][1]])
    assert hunt["different"] >= SEQUENCES
    assert hunt["audits"] >= 10 * hunt["different"], "iterations audited in the server, ten for each sequence or more"
    record_property(conftest.PLAYED, (release, way, hunt["different"], hunt["events"], hunt["audits"]))


def test_thousands_are_played() -> None:
    """In each run of the suite, whichever releases it takes."""
    assert SEQUENCES * len(WAYS) * len(register.PLAYED) >= 3000


@each_release
def test_what_is_known_is_still_found(release: str) -> None:
    """So that an entry goes when its defect goes."""
    found = {name for way in WAYS for name in results(release, "plugin", way)["hunts"][0]["known"]}
    assert found == {entry.name for entry in known.KNOWN if release in entry.releases}


@each_release
@pytest.mark.parametrize("way", ["plain", "decode-overlap"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(release: str, way: str, bug: str) -> None:
    hunt = results(release, "plugin", way)["hunts"][1 + BUGS.index(bug)]
    wanted = known.PLANTED[bug]
    assert any(wanted in name for name in hunt["known"]), f"{wanted!r} was to be found, not only {hunt['known']}"


@each_release
@pytest.mark.parametrize("mode", OFF)
def test_an_unchanged_release_shows_its_defects(release: str, mode: str) -> None:
    found = results(release, "off", mode)["hunts"][0]["known"]
    wanted = known.UNCHANGED[mode][release]
    missing = [kind for kind in wanted if not any(kind in name for name in found)]
    assert wanted and not missing, f"{missing} were to be found, not only {sorted(found)}"


@each_release
@pytest.mark.parametrize(
    ("way", "script"),
    [pytest.param(way, script, id=f"{way}-{script.stem}") for way in WAYS for script in SCRIPTS[way]],
)
def test_a_regression(release: str, way: str, script: Path) -> None:
    found = results(release, "plugin", way)["found"][SCRIPTS[way].index(script)]
    assert not found, "\n".join(found)
