"""One process: the state machine on one release, in each mode; prints JSON.

    python -m lifecycle.hunt RELEASE VARIANT JOB

JOB is JSON: "modes", "sequences" or "seconds" of each, "steps", "seed", "planted", "collect" (nothing fails; everything
found is counted by kind) and "say" (progress on stderr).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time

from .known import classify, kind
from .process import MODES, _forked, _register

BATCH = 50
"""Sequences of one seed; the next batch has the next."""


def main(release: str, variant: str, text: str) -> None:
    job = json.loads(text)
    if variant == "plugin":
        _register()
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for every fork)

    print(json.dumps({mode: _forked(lambda mode=mode: _mode(release, mode, job)) for mode in job["modes"]}), flush=True)
    os._exit(0)


def _mode(release: str, mode: str, job: dict) -> dict:
    from . import server

    scheduler = server.start(*MODES[mode])
    gc.collect()
    gc.freeze()  # so that forks do not copy every page by counting references
    from .machine import Hunt

    hunt = Hunt(scheduler, planted=job.get("planted", ""))
    hunt.classify = kind if job.get("collect") else lambda evidence: classify(release, evidence)
    start = time.monotonic()
    for batch in range(10**9):
        left = _left(job, hunt, time.monotonic() - start)
        if not left or hunt.failure:
            break
        run(hunt, left, job["steps"], job["seed"] + batch)
        if job.get("say"):
            print(f"{release} {mode}: {hunt.sequences} sequences, {hunt.events} events", file=sys.stderr, flush=True)
    return {
        "sequences": hunt.sequences,
        "events": hunt.events,
        "kinds": hunt.kinds,
        "known": hunt.known,
        "failure": hunt.failure,
        "seconds": round(time.monotonic() - start, 1),
    }


def _left(job: dict, hunt, spent: float) -> int:
    if "seconds" in job:
        return BATCH if spent < job["seconds"] else 0
    return min(BATCH, max(0, job["sequences"] - hunt.sequences))


def run(hunt, sequences: int, steps: int, number: int) -> None:
    """So many sequences from one seed; what fails is left in `hunt`."""
    from hypothesis import seed
    from hypothesis.stateful import run_state_machine_as_test

    from .machine import Found, Machine, configured

    machine = seed(number)(type("Machine", (Machine,), {"hunt": hunt}))
    try:
        run_state_machine_as_test(machine, settings=configured(sequences, steps))
    except Found:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
