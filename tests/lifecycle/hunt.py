"""One process: the state machine on one release; prints JSON.

    python -m lifecycle.hunt RELEASE JOB

JOB is a JSON list of runs, each in a fork of its own: "variant" ("plugin" or "off"), "mode", "sequences" or "seconds",
"steps", "seed", and if wanted "collect" (nothing fails; everything found is counted by kind) and "planted"; or
instead of all these "scripts" to play.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from .known import classify, kind
from .process import MODES, _forked, _register

if TYPE_CHECKING:
    from .machine import Hunt

BATCH = 25
"""Sequences of one seed; the next batch has the next."""


def main(release: str, job: str) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for every fork)

    print(json.dumps([_forked(lambda run=run: _run(release, run)) for run in json.loads(job)]), flush=True)
    os._exit(0)


def _run(release: str, run: dict) -> dict:
    os.environ["SGLANG_HISPARSE_PLUGIN"] = "strict" if run["variant"] == "plugin" else "off"
    if run["variant"] == "plugin":
        _register()
    from . import server

    scheduler = server.start(*MODES[run["mode"]])
    gc.collect()
    gc.freeze()  # or each fork would copy every page by counting references
    if "scripts" in run:
        return {**run, "found": [_replayed(scheduler, text) for text in run["scripts"]]}
    from .machine import Hunt

    hunt = Hunt(scheduler, planted=run.get("planted", ""))
    hunt.classify = kind if run.get("collect") else lambda evidence: classify(release, evidence)
    start, batch = time.monotonic(), 0
    while not hunt.failure and (left := _left(run, hunt, time.monotonic() - start)):
        _batch(hunt, left, run["steps"], 1000 * run["seed"] + batch)
        batch += 1
        done = f"{hunt.sequences} sequences, {hunt.events} events, {time.monotonic() - start:.0f} s"
        print(f"fuzz: {release} {run['variant']} {run['mode']}: {done}", file=sys.stderr, flush=True)
    return {
        **run,
        "played": hunt.sequences,
        "events": hunt.events,
        "kinds": hunt.kinds,
        "known": hunt.known,
        "failure": hunt.failure,
        "took": round(time.monotonic() - start, 1),
    }


def _replayed(scheduler, text: str) -> list[str]:
    """The evidence of the first event of a script after which something is wrong."""
    from .fork import Fork
    from .script import lines

    fork = Fork(scheduler)
    try:
        for line in lines(text):
            if found := fork.play(line):
                return [f"{line}: {what}" for what in found]
        return []
    finally:
        fork.close()


def _left(run: dict, hunt: Hunt, spent: float) -> int:
    if "seconds" in run:
        return BATCH if spent < run["seconds"] else 0
    return min(BATCH, max(0, run["sequences"] - hunt.sequences))


def _batch(hunt: Hunt, sequences: int, steps: int, number: int) -> None:
    """So many sequences from one seed; what fails is left in `hunt`."""
    from hypothesis import seed
    from hypothesis.stateful import run_state_machine_as_test

    from .machine import Found, Machine, configured

    machine = seed(number)(type("Machine", (Machine,), {"hunt": hunt}))
    with contextlib.suppress(Found):
        run_state_machine_as_test(machine, settings=configured(sequences, steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
