"""Parts of a syntax tree: dotted names, nested statements, and what a name stands for when a body has run."""

from __future__ import annotations

import ast
from collections.abc import Iterator


class Rebound(Exception):
    """What a name stands for cannot be read from its definition: something else is assigned to it afterwards."""


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


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run with a body, those inside its ``if``, ``try``, ``with`` and loops included."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from flat(list(parts(statement)))


def last(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The definition that `name` stands for when a body has run; None when the body does not define it."""
    bound = [n for n in flat(body) if _defines(n, name) or sets(n, name) or _imports(n, name)]
    if not any(_defines(n, name) for n in bound):
        return None
    if not _defines(bound[-1], name):
        raise Rebound(f"{name} is bound anew in line {bound[-1].lineno}")
    return bound[-1]


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name


def _imports(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names)


def sets(node: ast.AST, dotted: str) -> bool:
    """Whether a statement assigns to the name or attribute `dotted`, by ``=`` or by `setattr`."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        if node.value and dotted_name(node.value) == dotted:  # ``name = name`` sets nothing new
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if node.value else []
        return any(dotted_name(n) == dotted for target in targets for n in (target, *getattr(target, "elts", ())))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and dotted_name(node.value.func) == "setattr":
        match node.value.args:
            case [owner, ast.Constant(value=attribute), *_]:
                return f"{dotted_name(owner)}.{attribute!s}" == dotted
    return False


def parts(statement: ast.AST) -> Iterator[ast.stmt]:
    """The statements directly in a compound statement, handlers and cases included."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body
