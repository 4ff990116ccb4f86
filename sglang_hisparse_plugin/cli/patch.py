"""``patch``: the overlays as diffs for upstream review. Only reads SGLang's source, and does not import it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .. import installation
from ..demo import releases
from ..overlays import OVERLAYS
from ..patching import patchfile, proof, series

EPILOG = "Exit codes: 0 fine, 1 a mismatch, 2 no SGLang found or wrong usage."


class UsageError(Exception):
    """What was asked for cannot be done as asked; the text names the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Actions of ``patch`` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the stored diffs", epilog=EPILOG)
    export = actions.add_parser("export", help="write a series with full context, from your own source", epilog=EPILOG)
    verify = actions.add_parser("verify", help="prove that the stored series equal the overlays", epilog=EPILOG)
    export.add_argument("--release", metavar="R", help="the series to take (default: that of the SGLang found)")
    export.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="folder to write (default: hisparse-patches-R)"
    )
    verify.add_argument("--release", nargs="+", metavar="R", help="the series to check (default: all that are stored)")
    for action in (export, verify):
        action.add_argument("--sglang-path", type=Path, metavar="DIR", help="an unpacked SGLang, not the installed one")
    for action in (listing, verify):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: fine; 1: a series does not apply or does not equal the overlays; 2: no SGLang, or wrong usage."""
    try:
        return {"list": _list, "export": _export, "verify": _verify}[options.action](options)
    except patchfile.PatchError as error:
        return _fail(options, error, 1)
    except (UsageError, installation.NotInstalled, releases.ReleaseUnavailable) as error:
        return _fail(options, error, 2)


def _list(options: argparse.Namespace) -> int:
    patches: dict[str, dict[str, Any]] = {}
    for release, folder in _stored().items():
        for patch in series.read(folder):
            entry = patches.setdefault(patch.id, {"id": patch.id, "releases": []})
            entry["releases"].append(release)
            entry |= {name.lower().replace("-", "_"): value for name, value in patch.fields.items()}
    if options.json:
        print(json.dumps({"patches": list(patches.values())}, indent=2))
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("patch", "releases", "upstream", "forwarded"):
        table.add_column(column, no_wrap=True)
    table.add_column("what it does")
    for entry in patches.values():
        bug = entry["bug"].rpartition("/")
        what = entry["description"].splitlines()[0]
        table.add_row(
            entry["id"], "\n".join(entry["releases"]), f"#{bug[2]}" if bug[1] else bug[2], entry["forwarded"], what
        )
    Console().print(table)
    return 0


def _export(options: argparse.Namespace) -> int:
    sglang = installation.find(options.sglang_path)
    release = options.release or sglang.version
    try:
        steps = list(series.steps(series.read(_folder(release)), sglang.root))
    except patchfile.Drift as error:
        raise patchfile.PatchError(
            f"{error}\n{sglang.root} is not the source of SGLang {release}. Export from an unpacked wheel of {release} "
            "(--sglang-path) and let `patch -p1` or `git apply --3way` carry the result over."
        ) from None
    texts = {f"{step.patch.id}.patch": patchfile.with_context(step.patch, step.changes) for step in steps}
    texts["series"] = "".join(f"{name}\n" for name in texts)
    output = options.output or Path(f"hisparse-patches-{release}")
    try:
        _write(texts, output)
    except OSError as error:
        raise UsageError(f"cannot write to {output}: {error}; name another folder with -o") from error
    patch, listed = (shlex.quote(str(output.resolve() / name)) for name in ("{}", "series"))
    print(
        f"Wrote {len(steps)} patches for SGLang {release} to {output}. "
        f"To apply them, in a copy of the folder that holds sglang/:\n  xargs -I{{}} patch -p1 -i {patch} < {listed}"
    )
    return 0


def _write(texts: dict[str, str], output: Path) -> None:
    if edited := [n for n, t in texts.items() if (output / n).exists() and (output / n).read_text("utf-8") != t]:
        raise UsageError(f"{output} has another {', '.join(edited)}; name another folder with -o, or remove it first")
    output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (output / name).write_text(text, "utf-8", newline="")


def _verify(options: argparse.Namespace) -> int:
    report = []
    for release, root in _sources(options):
        patches = series.read(_folder(release))
        found = proof.mismatches(patches, OVERLAYS, root)
        names = [patch.id for patch in patches]
        report.append({"release": release, "source": str(root), "patches": names, "mismatches": found})
        if not options.json:
            verdict = "MISMATCH" if found else "apply, compile, equal the overlays"
            print("\n  ".join([f"{release}: {len(names)} patches, {verdict}", *found]))
    if options.json:
        print(json.dumps({"series": report}, indent=2))
    return int(any(entry["mismatches"] for entry in report))


def _sources(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Each release to verify, with the folder that has its source: the given one, the installed one, or its wheel."""
    if options.sglang_path is not None:
        sglang = installation.find(options.sglang_path)
        yield from ((release, sglang.root) for release in options.release or [sglang.version])
        return
    try:
        installed = {installation.find().version: installation.find().root}
    except installation.NotInstalled:
        installed = {}
    for release in options.release or _stored():
        _folder(release)
        if release not in installed:
            print(f"SGLang {release} is not installed: taking its wheel", file=sys.stderr)
        yield release, installed.get(release) or releases.fetch(release)


def _stored() -> dict[str, Path]:
    if found := series.stored():
        return found
    raise UsageError("this installation has no folder `patches`; reinstall the plugin")


def _folder(release: str) -> Path:
    stored = _stored()
    if release in stored:
        return stored[release]
    raise UsageError(f"no series is stored for SGLang {release}; name one with --release: {', '.join(stored)}")


def _fail(options: argparse.Namespace, error: Exception, code: int) -> int:
    if getattr(options, "json", False):
        print(json.dumps({"error": str(error)}))
    print(f"sglang-hisparse patch {options.action}: {error}", file=sys.stderr)
    return code
