"""One process: start the scheduler of one release in one variant, run every scenario in a fork of it, print JSON.

    python -m lifecycle.process VARIANT [SCENARIO ...]

VARIANT is "plugin" to register the plugin, anything else to leave the release as it is; with "-overlap" the scheduler
processes a batch's result while the next batch runs, as it does by default.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def main(variant: str, *wanted: str) -> None:
    if variant.startswith("plugin"):
        _register()
    from . import server

    scheduler = server.start(*([] if variant.endswith("-overlap") else ["--disable-overlap-schedule"]))
    from . import scenarios

    results = {name: _forked(scheduler, name) for name in wanted or scenarios.SCENARIOS}
    print(json.dumps(results), flush=True)
    os._exit(0)  # the scheduler's threads have nothing to finish


def _register() -> None:
    """As SGLang's plugin loader does, or where there is none, our post-import hook."""
    from sglang_hisparse_plugin import installation, plugin

    if installation.find().has_loader:
        plugin.register()
    else:
        plugin.activate()


def _forked(scheduler, name: str) -> dict[str, object]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_run(scheduler, name), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"crash": "the process ended", "findings": [], "skipped": ""}


def _run(scheduler, name: str) -> dict[str, object]:
    from .scenarios import SCENARIOS
    from .world import World

    world, crash = World(scheduler), ""
    try:
        SCENARIOS[name](world)
    except Exception as error:
        frames = [
            f"{f.name} ({os.path.basename(f.filename)}:{f.lineno})" for f in traceback.extract_tb(error.__traceback__)
        ]
        crash = f"{type(error).__name__}: {error} in {' > '.join(frames[-6:])}"
    return {"crash": crash, "findings": world.findings, "skipped": world.skipped}


if __name__ == "__main__":
    main(*sys.argv[1:])
