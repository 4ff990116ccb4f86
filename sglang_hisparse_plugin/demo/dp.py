"""The demo's claims under DP attention: each rank has requests and pools of its own, and all compute together."""

from __future__ import annotations

from . import checks, walks
from .ranks import WITH, WITHOUT, without_hisparse
from .report import Part, Report, make
from .setup import Launcher
from .side_by_side import SideBySide, Up


def run(launcher: Launcher) -> Report:
    """Every check on one release."""
    report = Report(launcher.target.name, launcher.progress)
    without = launcher.server("without-hisparse", hisparse=False)
    with_plugin = launcher.server("plugin-on", retract=True)
    with SideBySide([without, with_plugin], at_once=launcher.scale.device == "cuda") as servers:
        servers.begin()
        parts: list[Part] = [
            (WITHOUT, lambda: without_hisparse(launcher, report, servers.up(without))),
            (WITH, lambda: _with_plugin(launcher, report, servers.up(with_plugin))),
        ]
        make(report, parts)
    return report


def _with_plugin(launcher: Launcher, report: Report, up: Up) -> None:
    """Requests go to the ranks in turn, wrong rows to the rank that is asked; and then one rank has all there is."""
    with up as server:
        checks.with_plugin(launcher, report, server, "plugin-on")
        for rank in range(launcher.dp):
            launcher.progress(f"plugin-on: requests on rank {rank} alone")
            answers = [walks.ask(server, *each, rank=rank) for each in walks.long(launcher.scale)]
            checks.all_exact(report, f"walks on rank {rank} are exact while no other has requests", answers)
        checks.pools_balance(report, server, "pools of every rank are balanced once more")
