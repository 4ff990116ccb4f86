"""Source of an installed package as syntax trees, read from disk without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class FunctionSource:
    """One function or method as it stands on disk."""

    module: str
    qualname: str
    path: Path
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def target(self) -> str:
        """``module:qualname``, the form hooks use."""
        return f"{self.module}:{self.qualname}"

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters in order, `self` included."""
        a = self.node.args
        return tuple(p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs))

    def calls(self, suffix: str) -> list[ast.Call]:
        """Calls in the body, in source order, whose dotted callee is `suffix` or ends in ``.suffix``."""
        found = [n for n in ast.walk(self.node) if isinstance(n, ast.Call) and ends_with(n.func, suffix)]
        return sorted(found, key=lambda n: (n.lineno, n.col_offset))

    def assigns(self, suffix: str) -> list[ast.Assign]:
        """Plain assignments in the body, in source order, to a target named `suffix` or ending in ``.suffix``."""
        found = [
            n for n in ast.walk(self.node) if isinstance(n, ast.Assign) and any(ends_with(t, suffix) for t in n.targets)
        ]
        return sorted(found, key=lambda n: n.lineno)

    def guards(self, inner: ast.AST) -> list[str]:
        """Source of every ``if`` test that encloses `inner` inside this function, outermost first.

        A node in the ``else`` branch is guarded by ``not (test)``.
        """
        return list(_guards(self.node, inner))


class SourceTree:
    """A folder that holds packages (site-packages or an unpacked wheel)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, tuple[Path, ast.Module] | None] = {}

    def module(self, dotted: str) -> ast.Module | None:
        """Syntax tree of module `dotted`; None when there is no such module."""
        entry = self._load(dotted)
        return entry[1] if entry else None

    def function(self, dotted: str, qualname: str) -> FunctionSource | None:
        """The last definition of `qualname` (``name`` or ``Class.name``) in module `dotted`; None when absent."""
        entry = self._load(dotted)
        if entry is None:
            return None
        path, scope = entry
        body: list[ast.stmt] = scope.body
        *classes, name = qualname.split(".")
        for wanted in classes:
            match = next((n for n in body if isinstance(n, ast.ClassDef) and n.name == wanted), None)
            if match is None:
                return None
            body = match.body
        functions = [n for n in _flat(body) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name]
        return FunctionSource(dotted, qualname, path, functions[-1]) if functions else None

    def has_class(self, dotted: str, name: str) -> bool:
        """Whether module `dotted` defines class `name` at its top level."""
        module = self.module(dotted)
        return module is not None and any(isinstance(n, ast.ClassDef) and n.name == name for n in module.body)

    def _load(self, dotted: str) -> tuple[Path, ast.Module] | None:
        if dotted not in self._modules:
            base = self.root.joinpath(*dotted.split("."))
            path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
            self._modules[dotted] = (path, ast.parse(path.read_text("utf-8"), str(path))) if path else None
        return self._modules[dotted]


def dotted_name(node: ast.AST) -> str:
    """``a.b.c`` of a name or attribute chain; the empty string for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value)
        return f"{base}.{node.attr}" if base else node.attr
    return ""


def ends_with(node: ast.AST, suffix: str) -> bool:
    """Whether a name or attribute chain is `suffix` or ends in ``.suffix``."""
    name = dotted_name(node)
    return name == suffix or name.endswith("." + suffix)


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, those inside top-level ``if``/``try`` included."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, ast.If | ast.Try):
                yield from _flat([n for n in getattr(statement, field, []) if isinstance(n, ast.stmt)])


def _guards(scope: ast.AST, inner: ast.AST) -> list[str]:
    for child in ast.iter_child_nodes(scope):
        if child is inner:
            return []
        if not any(n is inner for n in ast.walk(child)):
            continue
        deeper = _guards(child, inner)
        if isinstance(child, ast.If) and not any(n is inner for n in ast.walk(child.test)):
            test = ast.unparse(child.test)
            positive = any(n is inner for statement in child.body for n in ast.walk(statement))
            return [test if positive else f"not ({test})", *deeper]
        return deeper
    return []
