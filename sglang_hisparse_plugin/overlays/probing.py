"""How an overlay's probe says what it expects of the source, one line per expectation."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeGuard, TypeVar

from .. import upstream
from ..patching.outcome import Absent, Unknown, Verdict
from ..patching.source import FunctionSource, SourceTree
from ..patching.syntax import Rebound, ends_with

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
        try:
            if upstream.lacks_hisparse(tree):
                return Absent("this SGLang has no HiSparse")
            expect(upstream.has_hisparse(tree), f"class HiSparseCoordinator in {upstream.COORDINATOR}", "no such class")
            return judge(tree)
        except Drift as drift:
            return Unknown(drift.expected, drift.found)
        except Rebound as rebound:
            return Unknown("functions that are what their definition says", str(rebound))

    return verdict


def existing(function: T | None, name: str) -> T:
    """`function`, which must be there."""
    if function is None:
        raise Drift(name, "no such function where it is known to be")
    return function


def expect_hookable(function: FunctionSource, *names: str, more: bool = False) -> None:
    """A hook can stand in for `function`, which takes `names` by position, `self` included, and, if `more`, others."""
    expect_plain(function)
    a = function.node.args
    fits = function.positional[: len(names)] == names
    exact = function.parameters == names and a.vararg is None and a.kwarg is None
    expect(
        fits and (more or exact),
        f"{function.qualname}({', '.join(names)}{', ...' if more else ''})",
        f"({ast.unparse(a)})",
    )


def expect_plain(function: FunctionSource) -> None:
    """`function` is no coroutine, and nothing decorates it but what measures how long it takes."""
    decorators = [d for d in function.node.decorator_list if not (isinstance(d, ast.Call) and _measures(d.func))]
    marks = [f"@{ast.unparse(decorator)}" for decorator in decorators]
    marks += ["async"] if isinstance(function.node, ast.AsyncFunctionDef) else []
    expect(not marks, f"a plain def of {function.qualname}", " ".join(marks))


def _measures(decorator: ast.expr) -> bool:
    """Whether it is one of SGLang's that call the method with what they are called with, and return what it does."""
    return any(ends_with(decorator, name) for name in ("scheduler_nvtx_method", "scheduler_stage_method"))


def expect_free(function: FunctionSource, guards: list[set[str]], within: Sequence[str] = ()) -> ast.Call:
    """The only call of ``release_kv_cache(req, ...)``, under one of the sets of `guards`, in the blocks `within`."""
    frees = function.calls("release_kv_cache")
    expect(len(frees) == 1, f"one call of release_kv_cache in {function.qualname}", f"{len(frees)}")
    (free,) = frees
    found, around = conjuncts(function.guards(free)), function.blocks(free)
    expect(
        found in guards and around == [*within] and ast.unparse(free).startswith("release_kv_cache(req, "),
        f"release_kv_cache(req, ...) {' '.join(within)} {_all(guards[0]) or 'unconditionally'}".replace("  ", " "),
        f"{ast.unparse(free)} {' '.join(around)} {_all(found)}",
    )
    return free


def _all(guards: set[str]) -> str:
    return " and ".join(sorted(guards))


def tells(tree: SourceTree, function: FunctionSource, method: str, free: ast.Call, *unless: str) -> bool:
    """Whether the coordinator is told by ``method(req)`` before `free`, whenever HiSparse is on; False if nowhere.

    `unless` are further conditions the call may have. A coordinator that is used in any other way is drift.
    """
    calls = function.calls(method)
    if not calls:
        uses = [n for n in ast.walk(function.node) if ends_with(n, "hisparse_coordinator")]
        otherwise = conjuncts([]).union(*(conjuncts([f"not ({g})"]) for g in function.guards(free)))
        calls = [call for call in function.all_calls() if not conjuncts(function.guards(call)) & otherwise]
        reached = tree.callees(function, calls)
        helpers = [f.qualname for f in reached if f.calls("request_finished") or f.calls("retract_req")]
        expect(
            not uses and not helpers, f"{method}(req) or nothing told to the coordinator", ", ".join(helpers) or "other"
        )
        return False
    expect(
        len(calls) == 1
        and ends_with(calls[0].func, f"hisparse_coordinator.{method}")
        and ast.unparse(calls[0]).endswith(f".{method}(req)")
        and (calls[0].lineno, calls[0].col_offset) < (free.lineno, free.col_offset),
        f"one hisparse_coordinator.{method}(req) before {ast.unparse(free.func)}",
        "; ".join(f"{ast.unparse(call)} in line {call.lineno}" for call in calls),
    )
    guards = {g for g in conjuncts(function.guards(calls[0])) if not _says_hisparse_is_on(g)} - set(unless)
    wanted = conjuncts(function.guards(free))
    expect(
        guards == wanted and function.blocks(calls[0]) == function.blocks(free),
        f"{method}(req) under the conditions of {ast.unparse(free.func)}, and if HiSparse is on",
        " and ".join(sorted(guards)) or "other conditions",
    )
    return True


def _says_hisparse_is_on(guard: str) -> bool:
    node = ast.parse(guard, mode="eval").body
    return ends_with(node, "enable_hisparse") or ends_with(
        node.left if guard.endswith(" is not None") and isinstance(node, ast.Compare) else node, "hisparse_coordinator"
    )


def takes_staged(node: ast.AST) -> TypeGuard[ast.Assign | ast.AugAssign]:
    """Whether a statement keeps requests of the staging queue: ``... = [act.req for act in ... if ...]``."""
    if not isinstance(node, ast.Assign | ast.AugAssign) or not isinstance(node.value, ast.ListComp):
        return False
    loop = node.value.generators[0]
    return (
        ends_with(loop.iter, "hisparse_coordinator.ack_staging_queue")
        and ast.unparse(node.value.elt) == f"{ast.unparse(loop.target)}.req"
    )


def looks_at(function: FunctionSource, name: str) -> list[ast.AST]:
    """Where `function` names it, alone or as the end of a dotted name."""
    return [node for node in ast.walk(function.node) if ends_with(node, name)]


def expect_no_callee_looks_at(tree: SourceTree, function: FunctionSource, name: str, what: str) -> None:
    """Nothing that `function` calls looks at `name`, which the words `what` stand for."""
    helpers = [f.qualname for f in tree.callees(function, function.all_calls()) if looks_at(f, name)]
    expect(not helpers, f"nobody who looks {what}", ", ".join(helpers))


def expect(condition: bool, expected: str, found: str) -> None:
    """`condition` holds."""
    if not condition:
        raise Drift(expected, found)


OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Is: ast.IsNot, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Gt: ast.LtE, ast.Lt: ast.GtE},
    **{ast.IsNot: ast.Is, ast.NotEq: ast.Eq, ast.NotIn: ast.In, ast.LtE: ast.Gt, ast.GtE: ast.Lt},
}


def conjuncts(guards: list[str]) -> set[str]:
    """The conditions that all hold when the `guards` do, each in its plainest form (``a is b``)."""
    return {part for guard in guards for part in _split(ast.parse(guard, mode="eval").body, True)}


def _split(node: ast.expr, holds: bool) -> set[str]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _split(node.operand, not holds)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And if holds else ast.Or):
        return {part for value in node.values for part in _split(value, holds)}
    if not holds and isinstance(node, ast.Compare) and len(node.ops) == 1:
        node = ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
        return {ast.unparse(node)}
    return {ast.unparse(node if holds else ast.UnaryOp(ast.Not(), node))}
