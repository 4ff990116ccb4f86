"""Reading functions, calls, assignments and their guards from source that is never imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_hisparse_plugin.patching.source import SourceTree

SOURCE = """
raise RuntimeError("must not be imported")

if True:
    def free(a, /, b, *, c):
        return a


class Box:
    def put(self, item):
        if self.on:
            if item.ready:
                self.store.keep(item)
            else:
                self.full = True
        for x in item:
            self.store.keep(x)
        store.keepsake(item)

    def put(self, item, hard):
        keep(item)
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("def top(): ...")
    (tmp_path / "pkg" / "box.py").write_text(SOURCE)
    return SourceTree(tmp_path)


def test_finding(tree: SourceTree) -> None:
    free = tree.function("pkg.box", "free")
    assert free is not None and free.parameters == ("a", "b", "c") and free.target == "pkg.box:free"
    assert tree.function("pkg", "top") is not None
    assert tree.has_class("pkg.box", "Box") and not tree.has_class("pkg.box", "Bag")
    for absent in (("pkg.box", "Box.take"), ("pkg.box", "Bag.put"), ("pkg.lid", "put"), ("pkg.box", "Box")):
        assert tree.function(*absent) is None


def test_the_last_definition_counts(tree: SourceTree) -> None:
    put = tree.function("pkg.box", "Box.put")
    assert put is not None and put.parameters == ("self", "item", "hard") and len(put.calls("keep")) == 1


def test_calls_assignments_and_guards(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE.split("    def put(self, item, hard)", maxsplit=1)[0])
    put = SourceTree(tmp_path).function("one", "Box.put")
    assert put is not None
    first, second = put.calls("store.keep")
    assert put.guards(first) == ["self.on", "item.ready"] and put.guards(second) == []
    (full,) = put.assigns("full")
    assert put.guards(full) == ["self.on", "not (item.ready)"]
    assert put.guards(ast.parse("x")) == []
