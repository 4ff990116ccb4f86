"""Says at the end how many sequences of events were played."""

from __future__ import annotations

import warnings

PLAYED = "played by the state machine"


def pytest_collection_finish(session) -> None:
    """Tests of a group share what one process found, if they are run by one worker."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        warnings.warn("this pytest-xdist does not group tests: each worker computes every release", stacklevel=1)


def pytest_terminal_summary(terminalreporter) -> None:
    """Add up what the tests that passed have recorded, in whichever process they ran."""
    passed = terminalreporter.stats.get("passed", [])
    runs = [value for report in passed for name, value in report.user_properties if name == PLAYED]
    if not runs:
        return
    terminalreporter.section("sequences of events")
    for release, way, *counts in sorted(runs):
        terminalreporter.line("{:13}{:16}{:6} sequences {:7} events {:8} audits".format(release, way, *counts))
    totals = [sum(column) for column in zip(*(counts for _, _, *counts in runs), strict=True)]
    terminalreporter.line("{:29}{:6} sequences {:7} events {:8} audits".format("all, each different", *totals))
