"""``status``: what would be applied, skipped or refused, from source alone: no GPU, no import of SGLang."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__, config, installation
from ..overlays import OVERLAYS
from ..patching import engine
from ..patching.outcome import Refused
from ..plugin import LABELS

COLOURS = {"applied": "green", "skipped": "dim", "refused": "bold red"}
DISTRIBUTION = "sglang-hisparse-plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``status``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sglang-path", type=Path, metavar="DIR", help="an unpacked SGLang instead of the installed one"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0: every overlay's state is known; 1: something is refused; 2: no SGLang, or a bad setting."""
    try:
        sglang = installation.find(options.sglang_path)
        settings = config.read([overlay.id for overlay in OVERLAYS])
    except (installation.NotInstalled, config.ConfigError) as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        print(f"sglang-hisparse status: {error}", file=sys.stderr)
        return 2
    plan = engine.plan(OVERLAYS, sglang.tree, settings.skip)
    report: dict[str, Any] = {
        "plugin": __version__,
        "sglang": sglang.version,
        "path": str(sglang.root),
        "activation": _activation(sglang),
        "mode": settings.mode,
        "overlays": {name: {"outcome": LABELS[type(o)], **asdict(o)} for name, o in plan.items()},
        "warnings": _warnings(settings),
    }
    print(json.dumps(report, indent=2)) if options.json else _print(report)
    return int(any(isinstance(o, Refused) for o in plan.values()))


def _activation(sglang: installation.Installation) -> str:
    return "entry point, loaded by SGLang" if sglang.has_loader else ".pth file, at the first import of SGLang"


def _warnings(settings: config.Config) -> list[str]:
    copies = [d for d in metadata.distributions() if d.name == DISTRIBUTION]
    found = [*settings.complaints]
    if settings.mode == "off":
        found.append(f"{config.MODE_VARIABLE}=off: nothing will be touched")
    if not config.allowed_by_sglang():
        found.append(
            f"{config.PLUGINS_VARIABLE} is set and does not name {config.PLUGIN_NAME}: nothing will be touched"
        )
    if len({str(d.locate_file("")) for d in copies}) > 1:
        places = ", ".join(f"{d.version} in {d.locate_file('')}" for d in copies)
        found.append(f"several copies are installed ({places}); the first on sys.path runs: uninstall the others")
    return found


def _print(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"HiSparse plugin {report['plugin']} on SGLang {report['sglang']} ({report['path']})\n"
        f"Activated by: {report['activation']}. Mode: {report['mode']}.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("overlay", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("why")
    for name, entry in report["overlays"].items():
        why = f"{entry['reason']} ({entry['evidence']})" if "evidence" in entry else entry["reason"]
        table.add_row(name, f"[{COLOURS[entry['outcome']]}]{entry['outcome']}[/]", escape(why))
    console.print(table)
    for warning in report["warnings"]:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
