"""The interpreter, and this package in it: installed once, complete, and where SGLang looks for plugins."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ... import __version__, config
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, warning
from ..launch import PYTHON
from .sglang import name_of

DISTRIBUTION = "sglang-hisparse-plugin"
NEEDS = ("packaging", "rich", "unidiff", "wrapt")  # of pyproject.toml
OLDEST = (3, 10)


def gather(subject: Subject) -> Facts:
    copies = {
        str(d.locate_file("")): d.version for d in importlib.metadata.distributions() if name_of(d) == DISTRIBUTION
    }
    registered, problem = _registered()
    program = subject.launch.program
    if program and not PYTHON.fullmatch(program):
        program = _interpreter(program)
    found = shutil.which(program) if program else None
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "plugin": __version__,
        "package": str(Path(__file__).resolve().parents[2]),
        "installed": copies,
        "entry_point": registered,
        "entry_points_problem": problem,
        "pth": any(getattr(finder, "watches", "") == "sglang" for finder in sys.meta_path),
        "missing": [name for name in NEEDS if importlib.util.find_spec(name) is None],
        "server_program": subject.launch.program,
        "same_interpreter": not found or _same(found, sys.executable),
        "server_found": bool(found) or not program,
        "server_pythonpath": subject.launch.environment.get("PYTHONPATH"),
        "pythonpath": os.environ.get("PYTHONPATH"),
    }


GROUP = "sglang.srt.plugins"


def _registered() -> tuple[bool, str]:
    """Whether SGLang would find the plugin, and what keeps it from looking."""
    try:
        return any(e.name == config.PLUGIN_NAME for e in importlib.metadata.entry_points(group=GROUP)), ""
    except Exception as error:  # one damaged entry_points.txt of any package is enough
        return False, f"{type(error).__name__}: {error}"


def _same(one: str, other: str) -> bool:
    """Whether two interpreters have one environment: a venv's `python` is a link out of it, to what others share."""
    folders = [Path(os.path.abspath(path)).parent for path in (one, other)]
    in_venv = any((folder.parent / "pyvenv.cfg").exists() for folder in folders)
    return folders[0] == folders[1] or (not in_venv and os.path.realpath(one) == os.path.realpath(other))


def _interpreter(script: str) -> str:
    """The interpreter in the first line of a console script."""
    path = shutil.which(script)
    try:
        with open(path or script, encoding="utf-8", errors="replace") as file:
            first = file.readline(1000)
    except OSError:
        return script
    return first[2:].split()[0] if first.startswith("#!") and first[2:].split() else script


def judge(examined: Examined) -> Iterator[Finding]:
    facts, sglang = examined.facts("python"), examined.facts("sglang")
    if tuple(int(part) for part in facts["version"].split(".")[:2]) < OLDEST:
        yield error(f"Python {facts['version']} is too old", "use Python 3.10 or later, as SGLang does")
    if facts["missing"]:
        names = " ".join(facts["missing"])
        yield error(
            f"the plugin needs packages that are not here: {names}; it cannot be activated",
            f"{facts['executable']} -m pip install {names}",
        )
    if len(facts["installed"]) > 1:
        places = ", ".join(f"{version} in {place}" for place, version in facts["installed"].items())
        yield warning(
            f"several copies of the plugin are installed ({places}); the first on sys.path runs",
            f"pip uninstall {DISTRIBUTION} until none is left, then install one",
        )
    if problem := facts["entry_points_problem"]:
        yield error(
            f"the entry points of the installed packages cannot be read ({problem}), by SGLang's plugin loader either",
            "find the damaged entry_points.txt in site-packages (pip check, or by date) and reinstall its package",
        )
    elif sglang and not (facts["entry_point"] if sglang["has_loader"] else facts["pth"]):
        way = "no entry point of it is installed" if sglang["has_loader"] else "its .pth file is not read here"
        strict = any(examined.subject.launch.get(flag) for flag in ("plugin_mode", "plugin_skip"))
        level, then = (error, "knows no --hisparse-plugin") if strict else (warning, "runs HiSparse without its fixes")
        yield level(
            f"SGLang will not load the plugin: {way}; the server {then}",
            f"{facts['executable']} -m pip install {DISTRIBUTION}; a folder on PYTHONPATH is not enough",
        )
    yield from _elsewhere(examined, facts)


def _elsewhere(examined: Examined, facts: Facts) -> Iterator[Finding]:
    """The doctor looks at its own environment; the server may have another one."""
    program = facts["server_program"]
    if examined.subject.launch.container:
        yield warning(
            "the launch command starts a container, and this is not inside it",
            "run the doctor in that container, with the same options: `docker run ... sglang-hisparse doctor -- ...`",
        )
    elif not facts["server_found"]:
        yield error(f"the launch command's {program} does not exist here", "correct its path, or activate its venv")
    elif not facts["same_interpreter"]:
        yield warning(
            f"the server would run in the environment of {program}, the doctor looked at {facts['executable']}",
            f"run {program} -m sglang_hisparse_plugin.cli doctor ... instead, or the server with this interpreter",
        )
    wanted = facts["server_pythonpath"]
    if wanted is not None and wanted != facts["pythonpath"]:
        yield warning(
            f"the launch command sets PYTHONPATH={wanted}, under which the doctor did not run",
            f"run PYTHONPATH={wanted} sglang-hisparse doctor ...",
        )


def shown(facts: Facts) -> str:
    return f"{facts['version']} ({facts['executable']}), plugin {facts['plugin']} in {facts['package']}"


PROBE = Probe("python", gather, judge, shown)
