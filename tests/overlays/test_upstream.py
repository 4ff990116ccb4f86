"""Facts about releases that are looked up in the running process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import upstream
from sglang_hisparse_plugin.demo.releases import fetch
from sglang_hisparse_plugin.patching.source import SourceTree

from .forks import NEW, OLD


def refuses() -> Any:
    raise RuntimeError("not initialised")


class Unready:
    @property
    def tp_rank(self) -> int:
        raise AssertionError("not initialised")


def test_rank_among_the_arguments() -> None:
    """``Scheduler(server_args, port_args, gpu_id, tp_rank, ...)``"""
    tree = SourceTree(fetch(OLD))
    assert upstream.tp_rank(tree, ("server", "port", 0, 3), {}) == 3
    assert upstream.tp_rank(tree, ("server",), {"tp_rank": 2}) == 2
    assert upstream.tp_rank(tree, ("server",), {"tp_rank": None}) == 0


@pytest.mark.parametrize(
    ("scheduler", "rank"),
    [
        (None, 0),
        ({}, 0),
        ({"get_parallel": lambda: SimpleNamespace(tp_rank=5)}, 5),
        ({"get_parallel": lambda: None}, 0),
        ({"get_parallel": lambda wanted: wanted}, 0),
        ({"get_parallel": refuses}, 0),
        ({"get_parallel": Unready}, 0),
    ],
    ids=["no module", "no such state", "set", "nothing", "other arguments", "raises", "not ready"],
)
def test_rank_in_the_global_state(scheduler: dict[str, Any] | None, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, upstream.SCHEDULER, raising=False)
    if scheduler is not None:
        module = ModuleType(upstream.SCHEDULER)
        vars(module).update(scheduler)
        monkeypatch.setitem(sys.modules, upstream.SCHEDULER, module)
    assert upstream.tp_rank(SourceTree(fetch(NEW)), ("server",), {}) == rank


@pytest.mark.parametrize(
    "text", [None, "def (", "class Scheduler:\n    def __init__(self): ...\nScheduler = f(Scheduler)"]
)
def test_rank_where_the_source_says_nothing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        path = tmp_path.joinpath(*upstream.SCHEDULER.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert upstream.tp_rank(SourceTree(tmp_path), ("server", "port", 0, 3), {}) == 0
