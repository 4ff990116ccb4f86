"""Reading functions, calls, assignments and their guards from source that is never imported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sglang_hisparse_plugin.patching.source import FunctionSource, SourceTree
from sglang_hisparse_plugin.patching.syntax import Rebound

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


def function(tmp_path: Path, text: str) -> FunctionSource:
    (tmp_path / "one.py").write_text(text)
    found = SourceTree(tmp_path).function("one", "f")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("body", "guards", "blocks"),
    [
        ("if a: return\n free()", ["not (a)"], []),
        ("if a: pass\n free()", [], []),
        ("if a: pass\n else: raise x\n free()", ["not (not (a))"], []),
        ("if a:\n  if b: return\n  c()\n free()", ["not ((a) and (b))"], []),
        ("if a:\n  if b: return\n  return\n free()", ["not (a)"], []),
        ("for x in y:\n  if a: continue\n  free()", ["not (a)"], ["for x in y:"]),
        ("for x in y:\n  if a: break\n free()", [], []),
        ("while x:\n  if a: return\n free()", ["not (a)"], []),
        ("if a: return\n if b:\n  if c: raise x\n  free()", ["not (a)", "b", "not (c)"], []),
        ("def g(): return\n free()", [], []),
        ("try: free()\n except E: return", [], []),
        ("try: x()\n except E: free()", [], ["except E:"]),
        ("with a: free()", [], []),
        ("a and b and free()", ["a", "b"], []),
        ("a or free()", ["not (a)"], []),
        ("x = free() if a else b", ["a"], []),
        ("x = [free() for y in z]", [], ["[free() for y in z]"]),
        ("def g(): free()", [], ["def g():"]),
    ],
)
def test_what_stands_before_and_around(tmp_path: Path, body: str, guards: list[str], blocks: list[str]) -> None:
    f = function(tmp_path, f"def f():\n {body}\n")
    (call,) = f.calls("free")
    assert f.guards(call) == guards and f.blocks(call) == blocks


def test_positional_parameters(tree: SourceTree) -> None:
    free = tree.function("pkg.box", "free")
    assert free is not None and free.positional == ("a", "b")


@pytest.mark.parametrize(
    "added",
    [
        "Box.put = print",
        "setattr(Box, 'put', print)",
        "if True:\n    Box.put = print",
        "Box = print",
        "from bag import Box",
        "for Box.put, x in y: pass\nBox.put, x = y",
    ],
)
def test_a_name_bound_anew(tmp_path: Path, added: str) -> None:
    (tmp_path / "one.py").write_text(f"{SOURCE}\n{added}\n")
    with pytest.raises(Rebound, match="Box"):
        SourceTree(tmp_path).function("one", "Box.put")


def test_the_last_class_counts(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SOURCE + "\nclass Box:\n    def put(self): ...\n    def take(self): ...\n")
    put = SourceTree(tmp_path).function("one", "Box.put")
    assert put is not None and put.parameters == ("self",)


def test_a_definition_in_a_handler(tmp_path: Path) -> None:
    assert function(tmp_path, "try:\n    from x import f\nexcept ImportError:\n    def f(a): ...\n").parameters == (
        "a",
    )


def test_mentions(tree: SourceTree) -> None:
    assert tree.mentions("pkg", "keepsake") and tree.mentions("pkg.box", "keepsake")
    assert not tree.mentions("pkg", "keeps") and not tree.mentions("bag", "keepsake")
    (tree.root / "pkg" / "broken.py").write_bytes(b"def (\xff whole_word")
    assert tree.mentions("pkg", "whole_word")


def test_callees(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text("def far(): deep()\ndef deep(): ...\n")
    (tmp_path / "one.py").write_text(
        "from two import far as there\ndef near(): ...\n"
        "class A:\n def f(self):\n  self.g()\n  there()\n  x.h()\n def g(self): near()\n def h(self): ...\n"
    )
    tree = SourceTree(tmp_path)
    f = tree.function("one", "A.f")
    assert f is not None
    assert {found.target for found in tree.callees(f, f.all_calls())} == {"one:A.g", "one:near", "two:far"}
