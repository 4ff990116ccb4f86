"""What must hold for a statement to be reached, and what makes it run some other number of times than once."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from .syntax import parts

Block = (
    ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case | ast.FunctionDef | ast.AsyncFunctionDef
) | (ast.ClassDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
"""What runs its content some other number of times than once, and is no ``if``."""


def conditions(outer: ast.AST, child: ast.AST) -> Iterator[str]:
    """What `outer` asks before it gets to its `child`."""
    bodies = [b for name in ("body", "orelse", "finalbody") if isinstance(b := getattr(outer, name, None), list)]
    if isinstance(outer, ast.If | ast.IfExp) and child is not outer.test:
        positive = child in outer.body if isinstance(outer.body, list) else child is outer.body
        test = ast.unparse(outer.test)
        yield _if(test, positive)
    if isinstance(outer, ast.BoolOp):
        before = itertools.takewhile(lambda operand: operand is not child, outer.values)
        yield from (_if(ast.unparse(operand), isinstance(outer.op, ast.And)) for operand in before)
    for body in bodies:
        if child in body:
            for statement in body[: body.index(child)]:
                yield from (_if(test, False) for test in _exits(statement))


def _if(test: str, holds: bool) -> str:
    return test if holds else f"not ({test})"


def _exits(statement: ast.stmt, own_loop: bool = False) -> list[str]:
    """The conditions under which a statement leaves the body it stands in; ``True`` when it always does."""
    if isinstance(statement, ast.Return | ast.Raise):
        return ["True"]
    if isinstance(statement, ast.Continue | ast.Break):
        return [] if own_loop else ["True"]
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return []
    if not isinstance(statement, ast.If):
        own_loop = own_loop or isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        return [test for part in parts(statement) for test in _exits(part, own_loop)]
    test = ast.unparse(statement.test)
    found = []
    for branch, body in ((test, statement.body), (_if(test, False), statement.orelse)):
        inner = [exit for part in body for exit in _exits(part, own_loop)]
        found += [branch] if "True" in inner else [f"({branch}) and ({exit})" for exit in inner]
    return found
