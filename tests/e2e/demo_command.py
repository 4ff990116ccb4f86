"""The demo as a user runs it, and the checks of a server with HiSparse that it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WITH_HISPARSE = [
    "walks are exact without HiSparse",
    "the plugin is active in the server",
    "walks are exact with HiSparse, contexts 12x and 8x the hot buffer",
    "9 requests at once on 4 slots: all finish, all exact",
    "requests were retracted on the way",
    "control: one wrong host row in layer 0 breaks the walk where it is needed",
    "control: one wrong host row in layer 1 breaks the walk where it is needed",
    "pools are balanced at the end",
    "rows really came from the host",
]


def demo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "demo", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | env, timeout=1800)


def held(*arguments: str, work: Path) -> dict[str, Any]:
    """The record of a run in which every check held."""
    done = demo("--json", *arguments, f"--work-dir={work}")
    assert done.stdout, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, json.dumps(record["releases"], indent=1)
    return record


def refused(*arguments: str, **env: str) -> str:
    """What it says on stderr when it does not begin."""
    done = demo(*arguments, **env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr
