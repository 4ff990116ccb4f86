"""What the overlays read and hook in each tested release is what was read when they were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hisparse_plugin.matrix import TESTED
from sglang_hisparse_plugin.patching.source import SourceTree

from . import drift

Source = Callable[[str], Path]
KNOWN: dict[str, dict[str, str]] = json.loads(drift.RECORD.read_text())
REMEDY = "read what changed, then: python -m tests.compat.drift"


def differences(release: str, known: dict[str, str], found: dict[str, str]) -> list[str]:
    """One line for each function whose digest is new, gone or another."""
    return [
        f"SGLang {release}: {target}: recorded {known.get(target, 'nothing')}, found {found.get(target, 'nothing')}"
        for target in sorted(known.keys() | found.keys())
        if known.get(target) != found.get(target)
    ]


def test_every_tested_release_is_recorded() -> None:
    assert [*KNOWN] == [*TESTED], REMEDY


@pytest.mark.parametrize("release", TESTED)
def test_no_function_has_drifted(release: str, source: Source) -> None:
    lines = differences(release, KNOWN[release], drift.digests(source(release)))
    assert not lines, "\n".join([*lines, REMEDY])


@pytest.mark.parametrize("release", TESTED)
def test_every_hook_has_a_function_to_go_to(release: str, source: Source) -> None:
    tree = SourceTree(source(release))
    missing = [f"{name}: {at}" for name, at in drift.hooked(tree) if tree.function(*at.split(":")) is None]
    assert not missing


def test_a_changed_body_is_named(copied: Source) -> None:
    tree = copied("0.5.10.post1")
    file = tree / "sglang/srt/managers/schedule_batch.py"
    file.write_text(file.read_text().replace("release_kv_cache(req, self.tree_cache, is_insert=False)", "pass"))
    [line] = differences("0.5.10.post1", KNOWN["0.5.10.post1"], drift.digests(tree))
    target = "sglang.srt.managers.schedule_batch:ScheduleBatch.release_req"
    assert line.startswith(f"SGLang 0.5.10.post1: {target}: recorded {KNOWN['0.5.10.post1'][target]}, found ")
