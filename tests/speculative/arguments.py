"""One process: read every command line of `commands` as one release's launcher does, with the plugin, and print JSON.

python -m speculative.arguments FOLDER RELEASE

Each line is parsed by SGLang's own parser and resolved by its own `ServerArgs`, in a fork of a process that has
imported them; nothing is started. FOLDER: for the configurations of the models. Printed is, by command, what standard
error ended with (`said`), what `ServerArgs` came to (`serves`), and where it came from otherwise (`raised`).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from lifecycle.process import _forked, _register

from speculative import commands


def main(folder: str, release: str) -> None:
    _register()
    from sglang.srt import server_args

    for name, change in commands.MODELS.items():
        (Path(folder) / name).mkdir(exist_ok=True)
        (Path(folder) / name / "config.json").write_text(json.dumps(commands.CONFIG | change))
    _read(server_args, commands.GOOD["eagle"], folder)  # so that no fork imports anything
    results = {name: _forked(lambda c=command: _read(server_args, c, folder)) for name, command in commands.of(release)}
    print(json.dumps(results), flush=True)
    os._exit(0)  # no thread of SGLang's has anything to finish


def _read(server_args: object, command: commands.Command, folder: str) -> dict[str, object]:
    os.environ |= command.environment
    said = io.StringIO()
    serves: dict[str, object] = {}
    raised = ""
    with contextlib.redirect_stderr(said):
        try:
            serves = _resolved(server_args.prepare_server_args(list(command.words(folder))))
        except SystemExit as ended:
            raised = f"exit code {ended.code}"
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    lines = [line for line in said.getvalue().splitlines() if line.startswith("HiSparse plugin:")]
    return {"said": lines, "serves": serves, "raised": raised}


def _resolved(args: object) -> dict[str, object]:
    """What SGLang itself makes of some of the arguments."""
    if hasattr(args, "resolve_once"):
        args.resolve_once()
        from sglang.srt.arg_groups.overrides import resolved_view

        args = resolved_view(args)
    names = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_adaptive", "enable_mixed_chunk")
    return {name: getattr(args, name, None) for name in names}


if __name__ == "__main__":
    main(*sys.argv[1:])
