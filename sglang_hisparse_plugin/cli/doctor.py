"""``doctor``: what is wrong with an installation, a machine and a launch command. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from ..doctor import examine, launch, report
from ..doctor.table import PROBES
from .argument_types import count, seconds

EPILOG = """\
Exit code: 0 nothing is in the way; 1 the worst finding is a warning (it will
serve, but ...); 2 it is an error (it will not serve), or the doctor was called
wrongly.

Example:
  sglang-hisparse doctor -- python -m sglang.launch_server --model-path M \\
      --tp 8 --enable-hisparse ..."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``doctor``."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print one JSON object: findings and all facts")
    parser.add_argument(
        "--model",
        "--model-path",
        type=_model,
        metavar="PATH",
        help="folder or Hugging Face id of the model, as --model-path",
    )
    parser.add_argument("--hisparse-config", metavar="JSON", help="as the server's flag")
    parser.add_argument("--context-length", type=count(), metavar="N", help="as the server's flag (65536, 64Ki)")
    parser.add_argument("--sglang-path", type=Path, metavar="DIR", help="an unpacked SGLang, not the installed one")
    parser.add_argument(
        "--no-transfer", action="store_true", help="do not measure the host-to-device rate (2 s of copying)"
    )
    parser.add_argument("--time-limit", type=seconds, metavar="S", help="longest time of a probe; default: 20 to 120 s")
    parser.add_argument(
        "launch", nargs="*", metavar="-- COMMAND", help="your whole launch command, or the server's flags, after --"
    )


def _model(text: str) -> str:
    """A model's folder may be given by its config.json here, which SGLang does not take."""
    path = os.path.expanduser(text)  # os.path answers for names that are too long, too
    return os.path.dirname(path) or "." if os.path.basename(path) == "config.json" and os.path.isfile(path) else text


def run(options: argparse.Namespace) -> int:
    """Exit code: the worst finding."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # closed streams: pipes must not take their place
        pass
    os.close(fd)
    own = {"model": options.model, "hisparse_config": options.hisparse_config, "context_length": options.context_length}
    overrides = {name: value for name, value in own.items() if value is not None}
    command = launch.read(launch.words_of(options.launch), overrides)
    os.environ.update(command.environment)  # the probes see what the server would
    subject = examine.Subject(command, options.sglang_path, not options.no_transfer, options.time_limit)
    if not options.json and sys.stderr and sys.stderr.isatty():
        print("Looking; importing torch and SGLang may take a minute ...", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that the probes' processes end, too
    examination = examine.examine(subject, PROBES)
    out = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - nobody reads it
    try:
        if options.json:
            print(json.dumps(report.as_json(examination), indent=2), file=out)
        else:
            report.write(examination, out)
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk
        print(f"sglang-hisparse doctor: {report.verdict(examination)}\nThe report is lost: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return int(examination.worst)
