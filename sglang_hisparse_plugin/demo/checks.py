"""The demo's claims, each with what would falsify it."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import dataclass

from . import language, plan, probe, walks, weights
from .patience import Deadline, stretched
from .report import Part, Report, make
from .scales import Scale
from .server import Server
from .setup import Launcher
from .walks import Walk


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
    """Every check on one release."""
    report = Report(launcher.target.name, launcher.progress)
    parts: list[Part] = [
        ("without HiSparse", lambda: _without_hisparse(launcher, report)),
        ("with HiSparse and the plugin", lambda: _with_plugin(launcher, report)),
        ("with SGLang's own swap-in kernel", lambda: _with_upstream_swap_in(launcher, report)),
        *((control.name, lambda control=control: _without_plugin(launcher, report, control)) for control in CONTROLS),
    ]
    make(report, parts)
    return report


def _without_hisparse(launcher: Launcher, report: Report) -> None:
    with launcher.server("without-hisparse", hisparse=False) as server:
        launcher.progress("without-hisparse: long walks")
        answers = [walks.ask(server, *each) for each in walks.long(launcher.scale)]
        all_exact(report, "walks are exact without HiSparse", answers)


def _with_plugin(launcher: Launcher, report: Report) -> None:
    with launcher.server("plugin-on", retract=True) as server:
        with_plugin(launcher, report, server, "plugin-on")


def with_plugin(launcher: Launcher, report: Report, server: Server, name: str) -> list[Walk]:
    """What a server with HiSparse and forced retractions must do; returns the long walks."""
    scale = launcher.scale
    plan.plugin_active(launcher, report, server)
    launcher.progress(f"{name}: long walks")
    alone = [walks.ask(server, *each) for each in walks.long(scale)]
    all_exact(report, f"walks are exact with HiSparse, {walks.contexts(scale)}", alone)

    launcher.progress(f"{name}: {scale.crowd_size} requests, {scale.slots} slots")
    answers = walks.together(server, walks.crowd(scale, scale.crowd_size))
    all_exact(report, f"{scale.crowd_size} requests at once on {scale.slots} slots: all finish, all exact", answers)
    were_retracted(report, server)

    for layer, rank in itertools.product(range(scale.dims.layers), range(launcher.tp)):
        launcher.progress(f"{name}: a wrong host row in layer {layer}")
        one_wrong_row(launcher, report, server, layer, rank)
    _rows_came(report, pools_balance(report, server))
    _swap_in_served(launcher, report, server)
    return alone


def were_retracted(report: Report, server: Server) -> None:
    """Some requests were, and the figure of how many."""
    count = retractions(server)
    report.add("requests were retracted on the way", count > 0, f"{count} retractions")
    report.figures["retractions"] = count


def retractions(server: Server) -> int:
    """As its log counts them."""
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", server.log_text())))


def _swap_in_served(launcher: Launcher, report: Report, server: Server) -> None:
    name = "the plugin's swap-in kernel did the work"
    if launcher.scale.device == "cpu":
        report.add(name, None, "on a CPU a stand-in did")
    elif plan.called_for(launcher, report, SWAP_IN, name):
        fallen_back = re.findall(r"HiSparse overlay swap-in: (.*own kernel serves.*)", server.log_text())
        report.add(name, not fallen_back, "; ".join(fallen_back) or "throughout")


def _with_upstream_swap_in(launcher: Launcher, report: Report) -> None:
    name = "walks are exact with SGLang's own swap-in kernel, too"
    if launcher.scale.device == "cpu":
        report.add(name, None, "on a CPU the same stand-in serves as both kernels")
        return
    if not plan.called_for(launcher, report, SWAP_IN, name):
        return
    with launcher.server("upstream-swap-in", skip=SWAP_IN) as server:
        launcher.progress("upstream-swap-in: long walks")
        all_exact(report, name, [walks.ask(server, *each) for each in walks.long(launcher.scale)])


def _without_plugin(launcher: Launcher, report: Report, control: Control) -> None:
    scale = launcher.scale
    if not plan.called_for(launcher, report, control.overlay, control.name):
        return
    name = f"plugin-off-{control.overlay}"
    with launcher.server(name, plugin="off", retract=control.retract) as server:
        launcher.progress(f"{name}: waiting for the defect")
        answers = walks.together(server, walks.crowd(scale, scale.crowd_size if control.crowded else scale.slots))
        if "HiSparse plugin" in server.log_text():
            report.add(control.name, False, "the plugin is active although it is off")
        else:
            report.add(control.name, *damage(server, answers))


def damage(server: Server, answers: list[Walk]) -> tuple[bool, str]:
    """Whether the server shows a defect, and how: it ended with an exception, or answered with wrong tokens.

    A request that got no answer proves nothing as long as the server lives: it may only be slow.
    """
    unanswered = [walk for walk in answers if walk.got is None]
    ended = bool(unanswered) and server.ended(stretched(END_PATIENCE))
    if ended and (last := server.last_exception()):
        return True, f"the server ended: {last}"
    if wrong := [walk for walk in answers if walk.got is not None and not walk.exact]:
        return True, f"{len(wrong)} of {len(answers)} walks wrong, the first of them {wrong[0]}"
    if unanswered:
        state = "ended, and its log does not say why" if ended else "lives"
        return False, f"the server {state}; {len(unanswered)} of {len(answers)} requests: {unanswered[0]}"
    return False, f"nothing went wrong: {len(answers)} of {len(answers)} walks exact"


def one_wrong_row(launcher: Launcher, report: Report, server: Server, layer: int, rank: int = 0) -> None:
    """One digit of one host row is made wrong; the walk must break at the step that needs the row, not before."""
    scale = launcher.scale
    where = f"layer {layer}" if launcher.tp == 1 else f"layer {layer}, on rank {rank} alone,"
    name = f"control: one wrong host row in {where} breaks the walk where it is needed"
    tokens, step, position, source = wrong_row(scale, layer)
    stage, own_layer = divmod(layer, scale.dims.layers // launcher.pp)
    fault = probe.fault_id(stage * launcher.tp + rank, own_layer, position, source)
    walk = walks.ask(server, tokens, step + 8, rid=fault, rank=rank if launcher.dp > 1 else None)
    report.add(name, walk.break_at == step, f"row {position}, needed at step {step}: {walk}")


def wrong_row(scale: Scale, layer: int) -> tuple[list[int], int, int, int]:
    """A prompt, the step of its walk that needs a row beyond the hot buffer, that row, and one of another digit."""
    tokens = language.prompt(scale.long[-1], seed=1000 + layer)
    step, position = walks.first_step_beyond(tokens, scale.hot_buffer)
    digits = weights.content_digits()
    right = digits[language.Edge.of(tokens[position]).content][layer]
    source = next(i for i, t in enumerate(tokens) if weights.differ(digits[language.Edge.of(t).content][layer], right))
    return tokens, step, position, source


def pools_balance(report: Report, server: Server, name: str = "pools are balanced at the end") -> dict[str, int] | None:
    """Idle again, every pool has as many free slots as at the start; returns what swap-ins did, where that is known."""
    deadline = Deadline(IDLE_PATIENCE)
    while (state := server.internal_state()[probe.KEY])["now"] != state["start"] and not deadline.passed():
        time.sleep(0.5)
    start, now = state["start"], state["now"]
    lost = [f"{pool} {now[pool]} of {start[pool]}" for pool in start if now[pool] != start[pool]]
    report.add(name, not lost, "; ".join(lost) or ", ".join(f"{n} {k}" for k, n in now.items()))
    counts: dict[str, int] | None = state["swap_in"]
    return counts


def _rows_came(report: Report, counts: dict[str, int] | None) -> None:
    if counts:
        report.add(
            "rows really came from the host", counts["misses"] > 0, f"{counts['misses']} misses, {counts['hits']} hits"
        )
        report.figures |= {f"swap_in_{name}": count for name, count in counts.items()}


def all_exact(report: Report, name: str, answers: list[Walk]) -> None:
    """Every walk is what the dictionary says."""
    wrong = [str(walk) for walk in answers if not walk.exact]
    steps = sum(len(walk.right) for walk in answers)
    report.add(
        name, not wrong, f"{len(wrong)} of {len(answers)}: {wrong[0]}" if wrong else f"{steps} of {steps} tokens"
    )
