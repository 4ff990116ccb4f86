"""What the doctor prints: JSON for machines, plain text for people."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, TextIO

from .. import __version__, lines
from .examine import Examination, Probe
from .finding import Finding, Level

COLOURS = {Level.ERROR: "1;31", Level.WARNING: "33", Level.NOTE: "2"}
LABEL = 16  # columns


def as_json(examination: Examination) -> dict[str, Any]:
    """Everything, as the documentation of ``doctor --json`` has it."""
    outcomes = examination.examined.outcomes
    return {
        "plugin": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "verdict": verdict(examination),
        "exit_code": int(examination.worst),
        "findings": [
            {"level": f.level.name.lower(), "probe": f.probe, "what": f.what, "remedy": f.remedy}
            for f in examination.findings
        ],
        "facts": {probe.name: outcomes[probe.name].value for probe in examination.probes},
        "probes": {
            name: {"seconds": o.seconds, "failure": o.failure or None, "output": o.output}
            for name, o in outcomes.items()
        },
    }


def verdict(examination: Examination) -> str:
    """The whole result in one line."""
    worst = [f for f in examination.findings if f.level == examination.worst]
    if examination.worst == Level.NOTE:
        launch = examination.examined.subject.launch
        return "ready" if launch.given else "ready, as far as can be told without a launch command"
    head = "will not serve" if examination.worst == Level.ERROR else "will serve, but"
    more = f" (and {len(worst) - 1} more)" if len(worst) > 1 else ""
    return f"{head}{':' if examination.worst == Level.ERROR else ''} {' '.join(worst[0].what.split())}{more}"


def write(examination: Examination, out: TextIO) -> None:
    """The facts in a line each, the findings with their remedies, the worst first, and the verdict."""
    width = lines.width()
    colour = out.isatty() and not os.environ.get("NO_COLOR")
    rows = [f"sglang-hisparse doctor {__version__}", ""]
    rows += [_fact(probe, examination, width) for probe in examination.probes]
    for finding in examination.findings:
        rows += ["", *_finding(finding, width, colour)]
    rows += ["", lines.fill(f"Verdict: {verdict(examination)}")]
    encoding = out.encoding or "ascii"
    text = "\n".join(rows) + "\n"
    out.write(text.encode(encoding, "replace").decode(encoding))


def _fact(probe: Probe, examination: Examination, width: int) -> str:
    failure = examination.examined.failure(probe.name)
    try:
        text = f"no answer: {failure}" if failure else probe.shown(examination.examined.facts(probe.name))
    except Exception as error:  # facts of a shape that nobody thought of
        text = f"cannot be shown: {type(error).__name__}: {error}"
    text = textwrap.shorten(text, 4 * width, placeholder=" ...")
    blank = " " * LABEL
    return textwrap.fill(text, width, initial_indent=f"{probe.name:{LABEL}}", subsequent_indent=blank)


def _finding(finding: Finding, width: int, colour: bool) -> Iterator[str]:
    label = f"{finding.level.name.lower():9}"
    for prefix, text in ((label, finding.what), (" " * 9, f"-> {finding.remedy}")):
        filled = textwrap.fill(
            " ".join(text.split()), width, initial_indent=prefix, subsequent_indent=" " * 12, break_long_words=False
        )
        if colour and prefix == label:
            filled = f"\x1b[{COLOURS[finding.level]}m{label}\x1b[0m{filled[len(label) :]}"
        yield filled
