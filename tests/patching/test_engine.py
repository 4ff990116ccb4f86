"""Plan, transaction, verification and undo, with a registry and without, beside other people's hooks."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sglang_hisparse_plugin.patching import engine
from sglang_hisparse_plugin.patching.hooker import Hooker, RegistryHooker, Shim, WraptHooker, in_place, resolve
from sglang_hisparse_plugin.patching.outcome import (
    Absent,
    Applied,
    Defective,
    Fixed,
    Refused,
    Skipped,
    Unknown,
    Verdict,
)
from sglang_hisparse_plugin.patching.overlay import Around, Hook, Overlay
from sglang_hisparse_plugin.patching.source import SourceTree

START = "host_under_test.machine:Machine.start"
BRAKE = "host_under_test.machine:brake"


def double(original: Any, machine: Any, speed: int) -> Any:
    return original(machine, speed * 2)


def harder(original: Any, force: int) -> Any:
    return original(force) + 100


def overlay(
    name: str,
    *hooks: tuple[str, Around],
    verdict: Verdict | None = None,
    group: str = "",
    requires: tuple[str, ...] = (),
) -> Overlay:
    return Overlay(
        id=name,
        symptom=f"{name} goes wrong",
        why="",
        loses=f"{name} goes wrong",
        rows=(),
        origin="",
        remove_when="",
        probe=lambda _tree: verdict or Defective("seen"),
        hooks=lambda _tree: tuple(Hook(*h) for h in hooks),
        fixed_since="9.9",
        group=group,
        requires=requires,
    )


class Registry:
    """Behaves as a host's hook registry: collects around-hooks, applies each target once, in order of registration."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Shim]] = {}

    def register(self, target: str, shim: Shim) -> None:
        self.hooks.setdefault(target, []).append(shim)

    def apply(self) -> None:
        for target, hooks in self.hooks.items():
            path = target.split(".")
            module = importlib.import_module(".".join(path[:2]))
            parent: Any = functools.reduce(getattr, path[2:-1], module)
            raw = vars(parent)[path[-1]]
            kind = type(raw) if isinstance(raw, classmethod | staticmethod) else None
            function = raw.__func__ if kind else raw
            for hook in hooks:
                function = self._around(function, hook)
            setattr(parent, path[-1], kind(function) if kind else function)

    @staticmethod
    def _around(inner: Callable[..., Any], hook: Shim) -> Callable[..., Any]:
        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(inner, *args, **kwargs)

        return wrapper


@pytest.fixture(params=["wrapt", "registry"])
def way(request: pytest.FixtureRequest) -> tuple[Hooker, Callable[[], None]]:
    """A hooker, and what the host does after all plugins ran."""
    if request.param == "wrapt":
        return WraptHooker(), lambda: None
    registry = Registry()
    return RegistryHooker(registry.register), registry.apply


def run(tree: SourceTree, overlays: list[Overlay], way: tuple[Hooker, Callable[[], None]]) -> engine.Ledger:
    ledger = engine.Ledger()
    engine.apply(overlays, tree, engine.plan(overlays, tree), lambda _target: way[0], ledger)
    way[1]()
    return ledger


def machine() -> Any:
    return importlib.import_module("host_under_test.machine")


def test_verdicts_become_outcomes_with_a_sentence(host: SourceTree) -> None:
    overlays = [
        overlay("broken"),
        overlay("mended", verdict=Fixed("the guard is there")),
        overlay("missing", verdict=Absent("no such feature")),
        overlay("strange", verdict=Unknown("a guard", "two guards")),
        overlay("unwanted"),
    ]
    outcomes = engine.plan(overlays, host, skip=["unwanted"])
    assert outcomes == {
        "broken": Applied("broken goes wrong"),
        "mended": Skipped("already fixed (upstream since 9.9): the guard is there"),
        "missing": Skipped("no such feature"),
        "strange": Refused("Without it strange goes wrong", "expected a guard; found two guards"),
        "unwanted": Skipped("left out on request"),
    }


def test_a_method_a_class_method_a_static_method_and_a_function(host: SourceTree, way: Any) -> None:
    ledger = run(
        host,
        [
            overlay(
                "all",
                (START, double),
                ("host_under_test.machine:Machine.build", lambda original, cls, name: original(cls, name.upper())),
                ("host_under_test.machine:Machine.unit", lambda original: original() + "!"),
                (BRAKE, harder),
            )
        ],
        way,
    )
    m = machine().Machine()
    assert (m.start(4), m.start(speed=5), m.log) == (8, 10, [8, 10])
    assert machine().Machine.build("x") == (machine().Machine, "X")
    assert machine().Machine.unit() == m.unit() == "m/s!"
    assert machine().brake(1) == 101
    assert all(in_place(p.target, p.shim) for p in ledger.patches)


def test_a_name_imported_elsewhere_follows(host: SourceTree) -> None:
    user = importlib.import_module("host_under_test.user")
    ledger = run(host, [overlay("b", (BRAKE, harder))], (WraptHooker(), lambda: None))
    assert user.stop() == 103
    engine.undo(ledger)
    assert user.stop() == 3


def test_twice_equals_once(host: SourceTree, way: Any) -> None:
    overlays = [overlay("d", (START, double))]
    ledger = run(host, overlays, way)
    engine.apply(overlays, host, engine.plan(overlays, host), lambda _target: WraptHooker(), ledger)
    assert machine().Machine().start(4) == 8
    assert len(ledger.patches) == 1


@pytest.mark.parametrize("steps", sorted(set(itertools.permutations("aauu"))), ids="".join)
def test_any_order_of_apply_and_undo_ends_clean(host: SourceTree, steps: tuple[str, ...]) -> None:
    overlays, ledger = [overlay("d", (START, double))], engine.Ledger()
    untouched = resolve(START)[2]
    expected = 4
    for step in steps:
        if step == "a":
            engine.apply(overlays, host, engine.plan(overlays, host), lambda _target: WraptHooker(), ledger)
            expected = 8
        else:
            assert engine.undo(ledger) == []
            expected = 4
        assert machine().Machine().start(4) == expected
    assert (resolve(START)[2] is untouched) == (expected == 4)


def test_undo_restores_the_original(host: SourceTree, way: Any) -> None:
    before = resolve(START)[2]
    ledger = run(host, [overlay("d", (START, double))], way)
    assert resolve(START)[2] is not before
    assert engine.undo(ledger) == []
    assert resolve(START)[2] is before and ledger.patches == [] and ledger.outcomes == {}


def test_undo_under_somebody_elses_wrapper_leaves_theirs_and_passes_through(host: SourceTree, way: Any) -> None:
    ledger = run(host, [overlay("d", (START, double))], way)
    cls = machine().Machine
    ours = cls.start
    cls.start = lambda self, speed: ours(self, speed) + 1
    cls.start.__wrapped__ = ours
    assert cls().start(4) == 9
    assert engine.undo(ledger) == [START]
    assert cls().start(4) == 5


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_plugins_hook_on_the_same_target_keeps_working(host: SourceTree, first: str) -> None:
    registry = Registry()

    def theirs(original: Any, machine: Any, speed: int) -> Any:
        return original(machine, speed) + 1

    ledger, overlays = engine.Ledger(), [overlay("d", (START, double))]

    def ours() -> None:
        hooker = RegistryHooker(registry.register)
        engine.apply(overlays, host, engine.plan(overlays, host), lambda _target: hooker, ledger)

    steps = [lambda: registry.register(START.replace(":", "."), theirs), ours]
    for step in steps if first == "theirs" else reversed(steps):
        step()
    registry.apply()
    engine.verify(overlays, ledger)
    assert machine().Machine().start(4) == 9
    assert isinstance(ledger.outcomes["d"], Applied)


def test_a_group_is_applied_together_or_not_at_all(host: SourceTree, way: Any) -> None:
    overlays = [
        overlay("first", (START, double), group="pair"),
        overlay("second", ("host_under_test.machine:Machine.fly", double), group="pair"),
        overlay("third", (BRAKE, harder)),
    ]
    ledger = run(host, overlays, way)
    assert machine().Machine().start(4) == 4 and machine().brake(1) == 101
    assert ledger.outcomes["first"] == Refused("Without it first goes wrong", "it only makes sense with second")
    assert (
        isinstance(ledger.outcomes["second"], Refused)
        and "Machine.fly does not exist" in ledger.outcomes["second"].evidence
    )
    assert isinstance(ledger.outcomes["third"], Applied)


@pytest.mark.parametrize("verdict", [Unknown("a", "b"), None])
def test_a_refusal_or_a_request_takes_what_depends_on_it_along(host: SourceTree, verdict: Verdict | None) -> None:
    overlays = [
        overlay("base", verdict=verdict),
        overlay("top", requires=("base",)),
        overlay("roof", requires=("top",)),
    ]
    outcomes = engine.plan(overlays, host, skip=() if verdict else ["base"])
    assert isinstance(outcomes["top"], Refused) and isinstance(outcomes["roof"], Refused)
    mended = engine.plan([replace(overlays[0], probe=lambda _tree: Fixed("yes")), *overlays[1:]], host)
    assert isinstance(mended["top"], Applied)


def test_verify_withdraws_the_group_of_a_patch_that_was_thrown_away(host: SourceTree, way: Any) -> None:
    overlays = [overlay("a", (START, double), group="g"), overlay("b", (BRAKE, harder), group="g")]
    ledger = run(host, overlays, way)
    engine.verify(overlays, ledger)
    assert all(isinstance(o, Applied) for o in ledger.outcomes.values())
    machine().Machine.start = lambda self, speed: speed
    engine.verify(overlays, ledger)
    assert ledger.outcomes["a"] == Refused("Without it a goes wrong", f"the patch of {START} is not in place")
    assert isinstance(ledger.outcomes["b"], Refused) and machine().brake(1) == 1


def test_verify_sees_a_registry_that_never_applied(host: SourceTree) -> None:
    overlays = [overlay("a", (START, double))]
    ledger = run(host, overlays, (RegistryHooker(Registry().register), lambda: None))
    engine.verify(overlays, ledger)
    assert isinstance(ledger.outcomes["a"], Refused)


def test_a_second_copy_of_the_plugin_does_not_patch_twice(host: SourceTree) -> None:
    overlays = [overlay("d", (START, double))]
    run(host, overlays, (WraptHooker(), lambda: None))
    second = run(host, overlays, (WraptHooker(), lambda: None))
    outcome = second.outcomes["d"]
    assert isinstance(outcome, Refused) and "another copy of the plugin, in " in outcome.evidence
    assert machine().Machine().start(4) == 8


def test_a_second_copy_that_registered_as_well_is_found_at_verification(host: SourceTree) -> None:
    """With a registry nobody is in place until the host applies it, so the second copy cannot see the first."""
    overlays, registry = [overlay("d", (START, double))], Registry()
    hooker = RegistryHooker(registry.register)
    first, second = (run(host, overlays, (hooker, lambda: None)) for _ in range(2))
    registry.apply()
    for ledger in (first, second):
        engine.verify(overlays, ledger)
    assert isinstance(first.outcomes["d"], Applied)
    outcome = second.outcomes["d"]
    assert isinstance(outcome, Refused) and "another copy of the plugin, in " in outcome.evidence
    assert machine().Machine().start(4) == 8


def test_a_probe_or_a_choice_of_hooks_that_fails_is_a_refusal(host: SourceTree) -> None:
    def fail(_tree: SourceTree) -> Any:
        raise IndexError("no such statement")

    blind = replace(overlay("blind"), probe=fail)
    lost = replace(overlay("lost"), hooks=fail)
    ledger = run(host, [blind, lost, overlay("d", (START, double))], (WraptHooker(), lambda: None))
    assert ledger.outcomes["blind"] == Refused(
        "Without it blind goes wrong", "expected source that the probe can read; found IndexError: no such statement"
    )
    assert ledger.outcomes["lost"] == Refused("Without it lost goes wrong", "IndexError: no such statement")
    assert machine().Machine().start(4) == 8


@pytest.mark.parametrize("kind", ["closure", "global", "default"])
def test_a_plain_wrapper_above_ours_that_calls_it_counts_as_in_place(host: SourceTree, way: Any, kind: str) -> None:
    overlays = [overlay("d", (START, double))]
    ledger = run(host, overlays, way)
    cls = machine().Machine
    scope: dict[str, Any] = {"inner": cls.start}
    source = {
        "closure": "def make(inner):\n    return lambda self, speed: inner(self, speed) + 1\n",
        "global": "def start(self, speed):\n    return inner(self, speed) + 1\n",
        "default": "def start(self, speed, inner=inner):\n    return inner(self, speed) + 1\n",
    }
    exec(source[kind], scope)
    cls.start = scope["make"](scope.pop("inner")) if kind == "closure" else scope["start"]
    assert cls().start(4) == 9
    engine.verify(overlays, ledger)
    assert isinstance(ledger.outcomes["d"], Applied)
    cls.start = lambda self, speed: speed
    engine.verify(overlays, ledger)
    assert isinstance(ledger.outcomes["d"], Refused)
