"""A set of checks on each SGLang that was asked for: find it, write the model, start, check, and leave nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from .. import installation, upstream
from . import model, releases, server
from .progress import Say, progress
from .report import Report
from .setup import Launcher, Target
from .weights import Draft

CPU_RELEASES = ("0.5.10.post1", "0.5.12")

Checks = Callable[[Launcher], Report]


class CannotRun(Exception):
    """Something the demo needs is not here; the text says what, and the remedy."""


def targets(wanted: list[str] | None, path: Path | None, device: str, console: Console) -> list[Target]:
    """The releases that are `wanted`, fetched; else the SGLang at `path` or installed; else, on a CPU, CPU_RELEASES.

    Raises:
        CannotRun, NotInstalled, ReleaseUnavailable: there is none, or one without HiSparse.
    """
    if not wanted:
        try:
            found = installation.find(path)
            return [_fit(Target(found.version, found.root))]
        except installation.NotInstalled:
            if path or device != "cpu":
                raise
    names = list(dict.fromkeys(map(releases.canonical, wanted or CPU_RELEASES)))
    fetched = []
    with progress(console) as begin:
        for release in names:
            begin(f"SGLang {release}")("looking for the wheel, or fetching it")
            fetched.append(_fit(Target(release, releases.fetch(release))))
    return fetched


def _fit(target: Target) -> Target:
    if upstream.lacks_hisparse(installation.find(target.root).tree):
        raise CannotRun(f"SGLang {target.name} has no HiSparse; take a release from {CPU_RELEASES[0]} on")
    return target


def on_each(
    every: list[Target],
    launcher: Callable[[Target, Say], Launcher],
    checks: Checks,
    *,
    drafts: list[Draft],
    at_once: bool,
    console: Console,
) -> list[Report]:
    """A report on every target.

    Args:
        drafts: versions of the model that the checks need.
        at_once: all targets; else one after the other.
    """
    with progress(console) as begin, ThreadPoolExecutor(len(every)) as pool:
        launchers = [launcher(target, begin(f"SGLang {target.name}")) for target in every]
        launchers[0].progress("writing the model")
        _write_models(launchers[0], drafts)
        mapped: Callable[..., Iterator[Report]] = pool.map if at_once else map
        try:
            return list(mapped(checks, launchers))
        except BaseException:
            server.stop_all()
            raise


def _write_models(launcher: Launcher, drafts: list[Draft]) -> None:
    try:
        for draft in drafts:
            model.write(model.folder(launcher.model, draft), launcher.scale.dims, draft)
    except OSError as error:
        raise CannotRun(
            f"cannot write the model to {launcher.work}: {error}; make room there, or name another folder with "
            "--work-dir"
        ) from error
