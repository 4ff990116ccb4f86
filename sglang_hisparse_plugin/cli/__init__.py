"""``sglang-hisparse``: the argparse tree. One file per command; each is imported only when it is called."""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__, lines

COMMANDS = {
    "doctor": "what is wrong with an installation, a machine and a launch command",
    "status": "what would be applied, skipped or refused on an SGLang",
    "demo": "the main job end to end on a model whose right answer is known",
    "bench": "time the swap-in kernel beside the installed release's and the measured limit",
    "size": "how many requests fit with and without HiSparse, flags for it, and what swap-in will cost",
    "explore": "what another hot buffer would do, from a trace of what a running server selects",
    "patch": "the same fixes as diffs: list, export, verify",
}


class WrongUse(Exception):
    """What argparse finds fault with."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """Leaves it to `main` to say what is wrong: that depends on --json."""

    def error(self, message: str) -> NoReturn:
        raise WrongUse(self, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(prog="sglang-hisparse", description="HiSparse plugin for SGLang")
    parser.add_argument("--version", action="version", version=f"sglang-hisparse-plugin {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    try:
        if empty := [word for word in own if word.startswith("--") and word.endswith("=--")]:
            raise WrongUse(parser, f"{empty[0]}: -- is no value")  # argparse would take it for none, and go on
        options = parser.parse_args(arguments)
    except WrongUse as wrong:
        if any(word.split("=")[0] == "--json" for word in own):
            print(json.dumps({"error": str(wrong)}), flush=True)
        wrong.parser.print_usage(sys.stderr)
        wrong.parser.exit(2, lines.fill(f"{wrong.parser.prog}: error: {wrong}", "  ") + "\n")
    try:
        code = int(options.run(options))
        if sys.stdout:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"sglang-hisparse {options.command}: the output is lost: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
