"""Command lines read by each release's own parser and `ServerArgs`: who is refused, with which line, and who is not.

`make test` reads them on the releases where something differs; EVERY_RELEASE=1 on all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from lifecycle import launch

sys.path.insert(0, str(Path(__file__).parents[1] / "doctor"))

from machine import judged

from sglang_hisparse_plugin.demo import releases
from speculative import commands

TIMEOUT_S = 600
#: The first as the command line was spelled to 0.5.13; from 0.5.19 on SGLang resolves arguments later.
BY_PLUGIN, NOBODY, BY_SGLANG = ("0.5.10.post1", "0.5.15"), ("0.5.20",), ("0.5.23",)
if os.environ.get("EVERY_RELEASE"):
    BY_PLUGIN = ("0.5.10", "0.5.10.post1", *(f"0.5.{n}" for n in range(11, 16)))
    NOBODY, BY_SGLANG = tuple(f"0.5.{n}" for n in range(16, 22)), ("0.5.22", "0.5.23")
NOWHERE = "and the plugin does not reach it: install 0.5.10 to 0.5.15, where the plugin serves it, or 0.5.22 or later"


@cache
def _results(release: str, folder: str) -> dict[str, dict] | str:
    environment = launch.environment(releases.fetch(release), "auto")
    command = [sys.executable, "-m", "speculative.arguments", folder, release]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        return f"{release} read no command line:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return json.loads(lines[0])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def _each() -> list:
    return [
        pytest.param(release, id=release, marks=pytest.mark.xdist_group(f"arguments-{release}"))
        for release in (*BY_PLUGIN, *NOBODY, *BY_SGLANG)
    ]


def expected(release: str, command: commands.Command) -> str:
    if release in NOBODY:
        return NOWHERE if command.asks else commands.SERVES
    return command.by_plugin if release in BY_PLUGIN else command.by_sglang


@pytest.mark.parametrize("release", _each())
def test_each_command_line_ends_with_its_line_or_serves(release: str, folder: str) -> None:
    results = _results(release, folder)
    assert isinstance(results, dict), results
    wrong = []
    for name, command in commands.of(release):
        says = expected(release, command)
        result = results[name]
        if says:
            as_told = result["raised"] == "exit code 1" and len(result["said"]) == 1 and says in result["said"][0]
        else:
            as_told = result["serves"] and not result["said"]
        if not as_told:
            wrong.append(f"{name}, {says or 'serves'}: {result}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("release", (*BY_PLUGIN, *NOBODY, *BY_SGLANG))
def test_the_doctor_judges_the_same(release: str) -> None:
    """By the same rules, from the words of the command alone and the facts of a machine on which nothing is wrong."""
    early = release in {"0.5.10", "0.5.10.post1", "0.5.11"}
    facts = {
        "sglang.version": release,
        "sglang.speculative": release in BY_SGLANG,
        "sglang.architectures.dsa": ["DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"],
        "sglang.draft_architectures": ["DeepseekV3ForCausalLM", *([] if early else ["DeepseekV32ForCausalLM"])],
        "sglang.top_k_from_model": not early,
        "overlays.overlays.speculative": {"outcome": "applied" if release in BY_PLUGIN else "skipped"},
    }
    wrong = []
    for name, command in commands.of(release):
        config = commands.CONFIG | commands.MODELS[command.model]
        variables = [f"{variable}={value}" for variable, value in command.environment.items()]
        words = [*variables, "python", "-m", "sglang.launch_server", *command.words("/models")]
        found = judged(
            facts
            | {"model.config": config, "model.architectures": config["architectures"], "model.weights_bytes": 1 << 30},
            words,
        ).findings
        errors = [f"{f.what} -> {f.remedy}" for f in found if f.level.name == "ERROR" and f.probe == "launch command"]
        if bool(errors) != bool(expected(release, command)):
            wrong.append(f"{name}, {expected(release, command) or 'serves'}: {errors}")
    assert not wrong, "\n".join(wrong)
