"""Every scenario on every supported release, with and without overlap: unchanged, with the plugin, and patched instead.

One process per release and variant runs them all; `--dist loadgroup` keeps its tests on one worker.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.patching import series

from . import launch, register
from .process import MODES

HERE = Path(__file__).parent
TIMEOUT_S = 600


def _scenarios() -> list[str]:
    """Their names, read from the source: importing it would import SGLang."""
    files = sorted(HERE.glob("scenarios*.py"))
    body = [node for file in files for node in ast.parse(file.read_text()).body]
    return [f.name.replace("_", "-") for f in body if isinstance(f, ast.FunctionDef) and f.decorator_list]


def _runs() -> list[tuple[str, str]]:
    patched = series.stored()
    return [
        *((release, "plugin") for release in register.RELEASES),
        *((release, "off") for release in register.RELEASES if release in register.SHOWN),
        *((release, "patched") for release in register.RELEASES if release in patched),
    ]


UNSERVED = [(release, "off") for release in register.UNSERVED]


@cache
def _results(release: str, variant: str) -> dict[str, dict] | str:
    """What all scenarios found, by mode, from one process; a text if it did not get that far."""
    with tempfile.TemporaryDirectory() as scratch:
        sglang = releases.fetch(release)
        if variant == "patched":
            series.apply(series.stored()[release], sglang, Path(scratch) / "patched")
            sglang = Path(scratch) / "patched"
        env = launch.environment(sglang, "strict" if variant == "plugin" else "off", TMPDIR=scratch)
        command = [sys.executable, "-m", f"{__package__}.process", variant]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = json.loads(lines[0]) if len(lines) == 1 else {}
    if done.returncode or not all(results.get(mode) for mode in MODES):
        return f"the scheduler of {release} ({variant}) did not start:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return results


@pytest.mark.parametrize(
    ("release", "variant", "mode", "scenario"),
    [
        pytest.param(*run, mode, name, id="-".join((*run, mode, name)), marks=pytest.mark.xdist_group("-".join(run)))
        for run in _runs()
        for mode in MODES
        for name in _scenarios()
        if run not in UNSERVED or name == "plain"
    ],
)
def test_scenario(release: str, variant: str, mode: str, scenario: str) -> None:
    results = _results(release, variant)
    if isinstance(results, str):
        pytest.fail(results)
    result = results[mode][scenario]
    assert result, "the process ended in the middle of the scenario"
    found = [*result["findings"], *filter(None, [result["crash"]])]
    if result["skipped"]:
        assert release not in register.ONLY_IN[scenario] and not found
        pytest.skip(result["skipped"])
    wanted = register.CONTROL.get(scenario) or (
        register.evidence(release, mode, scenario) if variant == "off" else register.OPEN.get((release, scenario), "")
    )
    if wanted:
        assert any(wanted in text for text in found), f"{wanted!r} was to be found, and not only {found}"
    else:
        assert not found, "\n".join(found)


def test_register_names_scenarios() -> None:
    assert {*register.DEFECTS, *register.WITH_OVERLAP, *register.CONTROL, *register.ONLY_IN} <= set(_scenarios())
