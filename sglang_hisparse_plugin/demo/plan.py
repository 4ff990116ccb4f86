"""What the source of an SGLang calls for, and whether a server of it has that."""

from __future__ import annotations

import re

from .. import installation
from ..overlays import OVERLAYS
from ..patching import engine
from ..patching.outcome import Applied, Refused, Skipped
from .report import Report
from .server import Server
from .setup import Launcher


def planned(launcher: Launcher) -> engine.Plan:
    """What the plugin does with this SGLang, by overlay."""
    return engine.plan(OVERLAYS, installation.find(launcher.target.root).tree, frozenset())


def called_for(launcher: Launcher, report: Report, overlay: str, name: str) -> bool:
    """Whether the source has the defect that `overlay` repairs; if not, the report says what is so instead."""
    outcome = planned(launcher).get(overlay)
    if isinstance(outcome, Applied):
        return True
    if isinstance(outcome, Skipped):
        report.add(name, None, outcome.reason)
    elif isinstance(outcome, Refused):
        report.add(name, False, f"cannot be made, {overlay} is refused: {outcome.evidence}. {outcome.reason}")
    else:
        report.add(name, False, f"cannot be made: the plugin has no overlay {overlay}")
    return False


def plugin_active(launcher: Launcher, report: Report, server: Server) -> None:
    """The server's own log says that what the source calls for is in place, and names every other overlay as skipped.

    Where the source calls for nothing, every overlay must have been skipped, and the detail says so.
    """
    plan, log = planned(launcher), server.log_text()
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
