"""The demo's claims, each with what would falsify it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .. import installation
from ..overlays import OVERLAYS
from ..patching import engine
from ..patching.outcome import Applied, Refused, Skipped
from . import model, probe
from .server import Server, ServerFailed
from .setup import Launcher, Scale


@dataclass
class Check:
    """One claim about one release."""

    name: str
    passed: bool | None
    """None: does not apply to this release; `detail` says why."""
    detail: str


@dataclass
class Report:
    """Checks and figures of one release, in the order in which they were made."""

    release: str
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, passed: bool | None, detail: str) -> None:
        self.checks.append(Check(name, passed, detail))

    @property
    def passed(self) -> bool:
        """Every check held, and none is missing because an earlier one could not finish."""
        return bool(self.checks) and all(check.passed is not False for check in self.checks)


@dataclass(frozen=True)
class Walk:
    """A prompt, its right continuation, and what came back."""

    tokens: list[int]
    right: list[int]
    got: list[int] | None
    error: str = ""

    @property
    def exact(self) -> bool:
        return self.got == self.right

    @property
    def break_at(self) -> int | None:
        """The first step whose token is wrong or missing; None for an exact walk or no answer."""
        if self.got is None or self.exact:
            return None
        pairs = zip(self.got, self.right, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.got), len(self.right)))

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        return f"no answer ({self.error})" if self.got is None else f"wrong from step {self.break_at}"


@dataclass(frozen=True)
class Control:
    """What must go wrong with the plugin off on a release that has the defect."""

    overlay: str
    """The overlay that repairs it."""
    name: str
    retract: bool
    crowded: bool
    """More requests than slots."""


CONTROLS = (
    Control("retract-order", "control: with the plugin off, retraction kills or corrupts", retract=True, crowded=False),
    Control("slot-count", "control: with the plugin off, more requests than slots kill", retract=False, crowded=True),
)
IDLE_PATIENCE = 20  #: seconds in which finished requests must have given everything back
END_PATIENCE = 30  #: seconds in which a server whose scheduler has died must have ended
SWAP_IN = "swap-in"  #: the overlay that replaces the swap-in kernel


def run(launcher: Launcher) -> Report:
    """Every check on one release. A server that does not start is a failed check, not an exception."""
    report = Report(launcher.target.name)
    start = time.monotonic()
    parts: list[tuple[str, Callable[[], None]]] = [
        ("without HiSparse", lambda: _without_hisparse(launcher, report)),
        ("with HiSparse and the plugin", lambda: _with_plugin(launcher, report)),
        ("with SGLang's own swap-in kernel", lambda: _with_upstream_swap_in(launcher, report)),
        *((control.name, lambda control=control: _without_plugin(launcher, report, control)) for control in CONTROLS),
    ]
    for name, part in parts:
        try:
            part()
        except (ServerFailed, OSError) as error:
            report.add(name, False, str(error))
    report.figures["seconds"] = round(time.monotonic() - start, 1)
    return report


def _without_hisparse(launcher: Launcher, report: Report) -> None:
    with launcher.server("without-hisparse", hisparse=False) as server:
        launcher.progress("without-hisparse: long walks")
        _all_exact(report, "walks are exact without HiSparse", [_ask(server, *each) for each in _long(launcher.scale)])


def _with_plugin(launcher: Launcher, report: Report) -> None:
    scale = launcher.scale
    with launcher.server("plugin-on", retract=True) as server:
        _plugin_active(launcher, report, server)
        launcher.progress("plugin-on: long walks")
        contexts = " and ".join(f"{length / scale.hot_buffer:.0f}x" for length in scale.long)
        name = f"walks are exact with HiSparse, contexts {contexts} the hot buffer"
        _all_exact(report, name, [_ask(server, *each) for each in _long(scale)])

        launcher.progress(f"plugin-on: {scale.crowd_size} requests, {scale.slots} slots")
        walks = _together(server, _crowd(scale, scale.crowd_size))
        _all_exact(report, f"{scale.crowd_size} requests at once on {scale.slots} slots: all finish, all exact", walks)
        retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log_text())))
        report.add("requests were retracted on the way", retracted > 0, f"{retracted} retractions")
        report.figures["retractions"] = retracted

        for layer in range(scale.dims.layers):
            launcher.progress(f"plugin-on: a wrong host row in layer {layer}")
            _one_wrong_row(scale, report, server, layer)
        _pools_balance(report, server)
        _swap_in_served(launcher, report, server)


def _swap_in_served(launcher: Launcher, report: Report, server: Server) -> None:
    name = "the plugin's swap-in kernel did the work"
    if launcher.scale.device == "cpu":
        report.add(name, None, "on a CPU a stand-in did")
    elif _called_for(launcher, report, SWAP_IN, name):
        fallen_back = re.findall(r"HiSparse overlay swap-in: (.*own kernel serves.*)", server.log_text())
        report.add(name, not fallen_back, "; ".join(fallen_back) or "throughout")


def _with_upstream_swap_in(launcher: Launcher, report: Report) -> None:
    name = "walks are exact with SGLang's own swap-in kernel, too"
    if launcher.scale.device == "cpu":
        report.add(name, None, "on a CPU the same stand-in serves as both kernels")
        return
    if not _called_for(launcher, report, SWAP_IN, name):
        return
    with launcher.server("upstream-swap-in", skip=SWAP_IN) as server:
        launcher.progress("upstream-swap-in: long walks")
        walks = [_ask(server, *each) for each in _long(launcher.scale)]
        _all_exact(report, name, walks)


def _without_plugin(launcher: Launcher, report: Report, control: Control) -> None:
    scale = launcher.scale
    if not _called_for(launcher, report, control.overlay, control.name):
        return
    name = f"plugin-off-{control.overlay}"
    with launcher.server(name, plugin="off", retract=control.retract) as server:
        launcher.progress(f"{name}: waiting for the defect")
        walks = _together(server, _crowd(scale, scale.crowd_size if control.crowded else scale.slots))
        if "HiSparse plugin" in server.log_text():
            report.add(control.name, False, "the plugin is active although it is off")
        else:
            report.add(control.name, *_damage(server, walks))


def _damage(server: Server, walks: list[Walk]) -> tuple[bool, str]:
    """Whether the server shows a defect, and how: it ended with an exception, or answered with wrong tokens.

    A request that got no answer proves nothing as long as the server lives: it may only be slow.
    """
    unanswered = [walk for walk in walks if walk.got is None]
    ended = bool(unanswered) and server.ended(END_PATIENCE)
    if ended and (last := server.last_exception()):
        return True, f"the server ended: {last}"
    if wrong := [walk for walk in walks if walk.got is not None and not walk.exact]:
        return True, f"{len(wrong)} of {len(walks)} walks wrong, the first of them {wrong[0]}"
    if unanswered:
        state = "ended, and its log does not say why" if ended else "lives"
        return False, f"the server {state}; {len(unanswered)} of {len(walks)} requests: {unanswered[0]}"
    return False, f"nothing went wrong: {len(walks)} of {len(walks)} walks exact"


def _plugin_active(launcher: Launcher, report: Report, server: Server) -> None:
    """The server's own log says that what the source calls for is in place, and names every other overlay as skipped.

    Where the source calls for nothing, every overlay must have been skipped, and the detail says so.
    """
    plan, log = _plan(launcher), server.log_text()
    wanted = {id for id, outcome in plan.items() if isinstance(outcome, Applied)}
    found = {
        label: set(re.findall(rf"HiSparse overlay (\S+): {label}", log)) for label in ("applied", "skipped", "refused")
    }
    refused = found["refused"] | {id for id, outcome in plan.items() if isinstance(outcome, Refused)}
    wrong = {
        "refused": refused,
        "missing": wanted - found["applied"] - refused,
        "applied although the source does not call for it": found["applied"] - wanted,
        "not in the log": set(plan).difference(*found.values()) - wanted - refused,
    }
    problems = [f"{what}: {', '.join(sorted(ids))}" for what, ids in wrong.items() if ids]
    if not plan:
        problems.append("the plugin has no overlays")
    if "HiSparse plugin" not in log:
        problems = ["its start log has no line of the plugin; install the plugin in this environment"]
    good = f"{len(wanted)} overlays applied, {len(plan) - len(wanted)} skipped"
    if not wanted:
        good = f"nothing to repair: this SGLang needs none of the {len(plan)} overlays, and all are skipped"
    report.add("the plugin is active in the server", not problems, "; ".join(problems) or good)


def _one_wrong_row(scale: Scale, report: Report, server: Server, layer: int) -> None:
    """One digit of one host row is made wrong; the walk must break at the step that needs the row, not before."""
    name = f"control: one wrong host row in layer {layer} breaks the walk where it is needed"
    tokens = model.prompt(scale.long[-1], seed=1000 + layer)
    step, position = _first_step_beyond(tokens, scale.hot_buffer)
    digits = model.content_digits()
    right = digits[model.Edge.of(tokens[position]).content][layer]
    source = next(i for i, t in enumerate(tokens) if digits[model.Edge.of(t).content][layer] != right)
    walk = _ask(server, tokens, step + 8, rid=probe.fault_id(layer, position, source))
    report.add(name, walk.break_at == step, f"row {position}, needed at step {step}: {walk}")


def _pools_balance(report: Report, server: Server) -> None:
    """Idle again, every pool has as many free slots as at the start."""
    deadline = time.monotonic() + IDLE_PATIENCE
    while (state := server.internal_state()[probe.KEY])["now"] != state["start"] and time.monotonic() < deadline:
        time.sleep(0.5)
    start, now = state["start"], state["now"]
    lost = [f"{name} {now[name]} of {start[name]}" for name in start if now[name] != start[name]]
    report.add(
        "pools are balanced at the end", not lost, "; ".join(lost) or ", ".join(f"{n} {k}" for k, n in now.items())
    )
    if counts := state["swap_in"]:
        report.add(
            "rows really came from the host", counts["misses"] > 0, f"{counts['misses']} misses, {counts['hits']} hits"
        )
        report.figures |= {f"swap_in_{name}": count for name, count in counts.items()}


def _plan(launcher: Launcher) -> engine.Plan:
    return engine.plan(OVERLAYS, installation.find(launcher.target.root).tree, frozenset())


def _called_for(launcher: Launcher, report: Report, overlay: str, name: str) -> bool:
    """Whether the source has the defect that `overlay` repairs; if not, the report says what is so instead."""
    outcome = _plan(launcher).get(overlay)
    if isinstance(outcome, Applied):
        return True
    if isinstance(outcome, Skipped):
        report.add(name, None, outcome.reason)
    elif isinstance(outcome, Refused):
        report.add(name, False, f"cannot be made, {overlay} is refused: {outcome.evidence}. {outcome.reason}")
    else:
        report.add(name, False, f"cannot be made: the plugin has no overlay {overlay}")
    return False


def _long(scale: Scale) -> list[tuple[list[int], int]]:
    return [(model.prompt(length, seed), scale.steps) for seed, length in enumerate(scale.long)]


def _crowd(scale: Scale, size: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    return [(model.prompt(rng.randint(*scale.crowd), seed=100 + i), scale.crowd_steps) for i in range(size)]


def _first_step_beyond(tokens: list[int], hot_buffer: int) -> tuple[int, int]:
    """The first step, after a few, that needs a row which the hot buffer did not hold at the start; and that row."""
    needed = ((step, model.needed_position(tokens, step)) for step in range(8, model.STAGES))
    return next((step, position) for step, position in needed if position > hot_buffer)


def _ask(server: Server, tokens: list[int], steps: int, rid: str | None = None) -> Walk:
    right = model.walk(tokens, steps)
    try:
        return Walk(tokens, right, server.generate(tokens, steps, rid))
    except OSError as error:
        return Walk(tokens, right, None, str(error) or type(error).__name__)


def _together(server: Server, prompts: list[tuple[list[int], int]]) -> list[Walk]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        try:
            return list(pool.map(lambda prompt: _ask(server, *prompt), prompts))
        except BaseException:  # interrupted: without the server no thread waits for its answer
            server.stop()
            raise


def _all_exact(report: Report, name: str, walks: list[Walk]) -> None:
    wrong = [str(walk) for walk in walks if not walk.exact]
    steps = sum(len(walk.right) for walk in walks)
    report.add(name, not wrong, f"{len(wrong)} of {len(walks)}: {wrong[0]}" if wrong else f"{steps} of {steps} tokens")
