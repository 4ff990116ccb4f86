"""One process: import one release, start its scheduler in each mode, run every scenario in a fork of that, print JSON.

    python -m lifecycle.process VARIANT [SCENARIO ...]

VARIANT is "plugin" to register the plugin first; anything else leaves SGLang as it is found.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable

MODES = {"plain": ("--disable-overlap-schedule",), "overlap": ()}
"""With overlap, SGLang's default, a batch's result is processed while the next batch runs."""
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
RESERVED = ("--num-reserved-decode-tokens", "64")  # of 512, SGLang's default, these pools would hold two
ALL_MODES = MODES | {f"decode-{mode}": (*more, *DECODE, *RESERVED) for mode, more in MODES.items()}
"""The decode side of PD disaggregation, too."""


def main(variant: str, *wanted: str) -> None:
    if variant == "plugin":
        _register()
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for every fork)

    print(json.dumps({mode: _forked(lambda mode=mode: _scenarios(mode, wanted)) for mode in MODES}), flush=True)
    os._exit(0)  # no thread of SGLang's has anything to finish


def _register() -> None:
    """As SGLang's plugin loader does, or where there is none, our post-import hook."""
    from sglang_hisparse_plugin import installation, plugin

    if installation.find().has_loader:
        plugin.register()
    else:
        plugin.activate()


def _forked(work: Callable[[], object]) -> object:
    """What `work` returns in a copy of this process; None if it did not come to an end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        result = work()
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def _scenarios(mode: str, wanted: tuple[str, ...]) -> dict[str, object]:
    from . import server

    scheduler = server.start(*MODES[mode])
    return {name: _forked(lambda name=name: _run(scheduler, name)) for name in wanted or _stories()}


def _stories() -> dict[str, Callable]:
    """Every scenario by name, from every file of them."""
    for module in pkgutil.iter_modules([os.path.dirname(__file__)]):
        if module.name.startswith("scenarios"):
            importlib.import_module(f".{module.name}", __package__)
    return sys.modules[f"{__package__}.scenarios"].SCENARIOS


def _run(scheduler, name: str) -> dict[str, object]:
    from .world import World

    world, crash = World(scheduler), ""
    try:
        _stories()[name](world)
    except Exception as error:
        calls = [
            f"{f.name} ({os.path.basename(f.filename)}:{f.lineno})" for f in traceback.extract_tb(error.__traceback__)
        ]
        crash = f"{type(error).__name__}: {error} in {' > '.join(calls[-6:])}"
    return {"crash": crash, "findings": world.findings, "skipped": world.skipped}


if __name__ == "__main__":
    main(*sys.argv[1:])
