"""How an overlay's probe says what it expects of the source, one line per expectation."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from .. import upstream
from ..patching.outcome import Absent, Unknown, Verdict
from ..patching.source import FunctionSource, SourceTree

T = TypeVar("T")


class Drift(Exception):
    """The source is not what the probe expects."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected, self.found = expected, found


def probe(judge: Callable[[SourceTree], Verdict]) -> Callable[[SourceTree], Verdict]:
    """Turn `Drift` into `Unknown`, and answer for an SGLang that has no HiSparse."""

    @wraps(judge)
    def verdict(tree: SourceTree) -> Verdict:
        if not upstream.has_hisparse(tree):
            return Absent("this SGLang has no HiSparse")
        try:
            return judge(tree)
        except Drift as drift:
            return Unknown(drift.expected, drift.found)

    return verdict


def existing(function: T | None, name: str) -> T:
    """`function`, which must be there."""
    if function is None:
        raise Drift(name, "no such function where it is known to be")
    return function


def expect_parameters(function: FunctionSource, *names: str) -> None:
    """The function's first parameters, `self` included, are `names`."""
    if function.parameters[: len(names)] != names:
        raise Drift(f"{function.qualname}({', '.join(names)}, ...)", f"({', '.join(function.parameters)})")


def expect(condition: bool, expected: str, found: str) -> None:
    """`condition` holds."""
    if not condition:
        raise Drift(expected, found)


def conjuncts(guards: list[str]) -> set[str]:
    """The conditions of nested ``if`` tests, those joined by ``and`` apart."""
    tests = [ast.parse(guard, mode="eval").body for guard in guards]
    parts = [t.values if isinstance(t, ast.BoolOp) and isinstance(t.op, ast.And) else [t] for t in tests]
    return {ast.unparse(part) for group in parts for part in group}
