"""Two ways to put a hook in place behind one interface, and the truth about what is in place.

`RegistryHooker` hands the hook to a host's own registry, which applies it later together with other plugins' hooks;
`WraptHooker` wraps at once. Both keep the wrapper chain walkable through ``__wrapped__``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import wrapt

Shim = Callable[..., Any]
"""``shim(original, *args, **kwargs)``"""


MOST_LAYERS = 64  #: of one target; a wrapper that names many functions leads nowhere useful


class HookError(Exception):
    """A hook could not be put in place; the text says where and why."""


class Hooker(Protocol):
    """Puts hooks in place, at once or when the host applies its registry."""

    def install(self, target: str, shim: Shim) -> None:
        """Call `shim` in place of the function at `target` (``module:qualname``).

        Raises:
            HookError: there is no such function.
        """


class WraptHooker:
    """Wraps immediately, on top of whatever is there."""

    def install(self, target: str, shim: Shim) -> None:
        parent, name, current = resolve(target)
        wrapped = wrapt.FunctionWrapper(current, _adapter(shim))
        _replace(parent, name, current, wrapped)


class RegistryHooker:
    """Registers with the host: ``register(dotted_target, shim)`` adds an around-hook that the host applies itself."""

    def __init__(self, register: Callable[[str, Shim], None]) -> None:
        self._register = register

    def install(self, target: str, shim: Shim) -> None:
        resolve(target)
        self._register(target.replace(":", "."), shim)


def resolve(target: str) -> tuple[Any, str, Any]:
    """Parent object, attribute name and raw attribute (from the parent's own ``__dict__``) of ``module:qualname``.

    Raises:
        HookError: the module cannot be imported or has no such attribute of its own.
    """
    module_name, qualname = target.split(":")
    try:
        parent: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise HookError(f"{module_name} cannot be imported: {error}") from error
    *path, name = qualname.split(".")
    for part in path:
        parent = vars(parent).get(part)
        if parent is None:
            raise HookError(f"{module_name} has no {part}")
    if name not in vars(parent):
        raise HookError(f"{target} does not exist")
    return parent, name, vars(parent)[name]


def in_place(target: str, shim: Shim) -> bool:
    """Whether calling the function at `target` now reaches `shim`, as far as can be seen from outside."""
    try:
        return any(_carries(layer, shim) for layer in layers(target))
    except HookError:
        return False


def layers(target: str) -> Iterator[Any]:
    """The function at `target` and everything it wraps, outermost first, nothing twice.

    What it wraps: its ``__wrapped__``, and for somebody's plain wrapper the functions it closes over or calls by a
    global name. Functions of the package that the target belongs to are ends: what they call is their business.
    """
    seen: set[int] = set()
    waiting = [resolve(target)[2]]
    package = target.partition(".")[0]
    while waiting and len(seen) < MOST_LAYERS:
        layer = waiting.pop(0)
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        inner = [i for i in (getattr(layer, "__wrapped__", None), getattr(layer, "__func__", None)) if i is not None]
        waiting += inner or _called_by(layer, package)


def shims(target: str) -> Iterator[Shim]:
    """Every shim (of any copy of this package) on the chain at `target`, outermost first."""
    for layer in layers(target):
        for candidate in _closure(layer):
            if hasattr(candidate, "hisparse_overlay"):
                yield candidate


def remove(target: str, shim: Shim) -> bool:
    """Take `shim` off `target` if it is the outermost layer; False when somebody has wrapped it since."""
    parent, name, current = resolve(target)
    if not _carries(current, shim):
        return False
    _replace(parent, name, current, next(inner for inner in layers(target) if not _carries(inner, shim)))
    return True


def _adapter(shim: Shim) -> Callable[..., Any]:
    """wrapt's calling convention for `shim`, which wants the unbound original and `self` among the arguments."""

    def adapter(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if instance is None:
            return shim(wrapped, *args, **kwargs)

        def unbound(_instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        return shim(unbound, instance, *args, **kwargs)

    return adapter


def _called_by(function: Any, package: str) -> list[Any]:
    """Functions that a plain function closes over, has as defaults, or names as globals."""
    if not isinstance(function, FunctionType) or str(function.__module__).partition(".")[0] == package:
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [f for f in (*_closure(function), *(function.__defaults__ or ()), *named) if _is_function(f)]


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | wrapt.FunctionWrapper | MethodType) and not hasattr(
        value, "hisparse_overlay"
    )


def _carries(layer: Any, shim: Shim) -> bool:
    return any(content is shim for content in _closure(layer))


def _closure(layer: Any) -> Iterator[Any]:
    """What a wrapper made by wrapt or by a registry closes over.

    A `classmethod`/`staticmethod` object forwards ``__wrapped__`` but has no closure of its own.
    """
    function = getattr(layer, "_self_wrapper", layer)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell not filled yet
                continue


def _replace(parent: Any, name: str, old: Any, new: Any) -> None:
    """Set ``parent.name``, and the copies that ``from module import name`` left in the package's other modules."""
    setattr(parent, name, new)
    if not isinstance(parent, ModuleType):
        return
    package = parent.__name__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)
