"""Source of an installed package as syntax trees, read from disk without importing it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .guards import Block, conditions
from .syntax import Rebound, dotted_name, ends_with, flat, last, sets


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

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the parameters that can be passed by position, `self` included."""
        return tuple(p.arg for p in (*self.node.args.posonlyargs, *self.node.args.args))

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
        """The tests that must hold for `inner` to be reached inside this function, outermost first.

        Those are the tests of the ``if`` it stands in (``not (test)`` for the ``else`` branch), the operands before it
        in ``and`` and ``or``, and ``not (test)`` for each earlier ``if test:`` that leaves by return, raise, continue
        or break. ``assert`` does not count.
        """
        return [test for outer, child in itertools.pairwise(self.way_to(inner)) for test in conditions(outer, child)]

    def all_calls(self) -> list[ast.Call]:
        """Every call in the body."""
        return [n for n in ast.walk(self.node) if isinstance(n, ast.Call)]

    def blocks(self, inner: ast.AST) -> list[str]:
        """First lines of the loops, handlers, comprehensions and nested definitions around `inner`, outermost first."""
        around = [node for node in self.way_to(inner)[1:-1] if isinstance(node, Block)]
        return [ast.unparse(node).strip().partition("\n")[0] for node in around]

    def way_to(self, inner: ast.AST) -> list[ast.AST]:
        """The nodes from the function's own down to `inner`, both included; empty when it is not in here."""
        way = [inner]
        while way[0] is not self.node:
            if way[0] not in self._parents:
                return []
            way.insert(0, self._parents[way[0]])
        return way

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.node) for child in ast.iter_child_nodes(node)}


class SourceTree:
    """A folder that holds packages (site-packages or an unpacked wheel)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, tuple[Path, ast.Module] | None] = {}
        self._imports: dict[str, list[tuple[str, str, str]]] = {}

    def module(self, dotted: str) -> ast.Module | None:
        """Syntax tree of module `dotted`; None when there is no such module."""
        entry = self._load(dotted)
        return entry[1] if entry else None

    def function(self, dotted: str, qualname: str) -> FunctionSource | None:
        """The last definition of `qualname` (``name`` or ``Class.name``) in module `dotted`; None when absent.

        Raises:
            Rebound: the module assigns something else to that name afterwards.
        """
        entry = self._load(dotted)
        if entry is None:
            return None
        path, scope = entry
        found: ast.AST = scope
        for name in qualname.split("."):
            inner = last(getattr(found, "body", []), name)
            if inner is None:
                return None
            found = inner
        if "." in qualname and any(sets(n, qualname) for n in flat(scope.body)):
            raise Rebound(f"{qualname} is assigned to after its class in {dotted}")
        return (
            FunctionSource(dotted, qualname, path, found)
            if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
            else None
        )

    def has_class(self, dotted: str, name: str) -> bool:
        """Whether module `dotted` defines class `name` at its top level."""
        module = self.module(dotted)
        return module is not None and isinstance(last(module.body, name), ast.ClassDef)

    def has_module(self, dotted: str) -> bool:
        """Whether there is a module `dotted`, whatever it holds."""
        return self._file(dotted) is not None

    def mentions(self, dotted: str, word: str) -> bool:
        """Whether `word` stands in the text of module `dotted`, or anywhere in the package `dotted`.

        The text need not be valid Python. A file that cannot be read may hold anything, so it counts as a mention.
        """
        folder = self.root.joinpath(*dotted.split("."))
        file = self._file(dotted)
        files = {*folder.rglob("*.py"), *([file] if file else [])}
        return any(_has_word(file, word) for file in files)

    def callees(self, function: FunctionSource, calls: Iterable[ast.Call]) -> Iterator[FunctionSource]:
        """What `function` reaches by these `calls`: imported functions, those of its module, methods of its class.

        What those of its module and class call there is followed too.
        """
        seen = {function.target}
        names = {dotted_name(call.func) for call in calls}
        todo = [
            found for name in names if (found := self._imported(function.module, name) or self._local(function, name))
        ]
        while todo:
            callee = todo.pop()
            if callee.target in seen:
                continue
            seen.add(callee.target)
            yield callee
            if callee.module == function.module:
                names = {dotted_name(call.func) for call in callee.all_calls()}
                todo += [found for name in names if (found := self._local(callee, name))]

    def _local(self, caller: FunctionSource, name: str) -> FunctionSource | None:
        owner = caller.qualname.rpartition(".")[0]
        qualname = name.replace("self.", f"{owner}.", 1) if owner else name
        return SourceTree.function(self, caller.module, qualname) if qualname.count(".") <= 1 else None

    def _imported(self, dotted: str, name: str) -> FunctionSource | None:
        places = [(module, original) for module, original, known_as in self._froms(dotted) if known_as == name]
        return next((found for place in places if (found := SourceTree.function(self, *place))), None)

    def _froms(self, dotted: str) -> list[tuple[str, str, str]]:
        """Module, name there and name here of every absolute ``from module import name`` in `dotted`."""
        if dotted not in self._imports:
            module = self.module(dotted)
            froms = [n for n in ast.walk(module) if isinstance(n, ast.ImportFrom) and not n.level] if module else []
            self._imports[dotted] = [(str(n.module), a.name, a.asname or a.name) for n in froms for a in n.names]
        return self._imports[dotted]

    def _file(self, dotted: str) -> Path | None:
        base = self.root.joinpath(*dotted.split("."))
        return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)

    def _load(self, dotted: str) -> tuple[Path, ast.Module] | None:
        if dotted not in self._modules:
            path = self._file(dotted)
            self._modules[dotted] = (path, ast.parse(path.read_text("utf-8"), str(path))) if path else None
        return self._modules[dotted]


def _has_word(file: Path, word: str) -> bool:
    try:
        return bool(re.search(rf"\b{re.escape(word)}\b", file.read_text("utf-8", errors="replace")))
    except OSError:
        return True
