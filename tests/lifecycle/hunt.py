"""One process: the state machine on one release; prints JSON.

    python -m lifecycle.hunt RELEASE JOB

JOB is a JSON list of schedulers, each in a fork of its own: "variant" ("plugin" or "off"), "mode", "hunts" and
"scripts" to play. A hunt has "sequences", "ended" (different ones that came to their end) or "seconds", besides "steps"
and "seed", and if wanted "collect" (nothing fails; everything found is counted by kind), "planted", "roomy" and
"shrink" (false: a failure stays as it was found).
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
from .process import ALL_MODES, _forked, _register

if TYPE_CHECKING:
    from .machine import Hunt

BATCH = 150
"""Sequences of one seed; the next batch has the next."""
TIMED = 40
"""Of a hunt that ends when its time is up, so that it notices."""
FEWEST = 30
"""Hypothesis begins each batch with the simplest sequences, which have been played."""


def main(release: str, job: str) -> None:
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for every fork)

    print(json.dumps([_forked(lambda part=part: _part(release, part)) for part in json.loads(job)]), flush=True)
    os._exit(0)


def _part(release: str, part: dict) -> dict:
    os.environ["SGLANG_HISPARSE_PLUGIN"] = "strict" if part["variant"] == "plugin" else "off"
    if part["variant"] == "plugin":
        _register()
    from . import kernels, server
    from .pools import Pools

    scheduler = server.start(*ALL_MODES[part["mode"]])
    kernels.install()
    assert not list(Pools(scheduler).audit({}))  # and has free rows overwritten once, and not in each fork
    gc.collect()
    gc.freeze()  # or each fork would copy every page by counting references
    where = f"{release} {part['variant']} {part['mode']}"
    print(f"fuzz: {where}: started", file=sys.stderr, flush=True)
    return {
        "variant": part["variant"],
        "mode": part["mode"],
        "hunts": [_hunt(scheduler, release, where, hunt) for hunt in part.get("hunts", ())],
        "found": [_replayed(scheduler, text) for text in part.get("scripts", ())],
    }


def _hunt(scheduler, release: str, where: str, wanted: dict) -> dict:
    from .machine import Hunt

    hunt = Hunt(scheduler, planted=wanted.get("planted", ""), roomy=wanted.get("roomy", False))
    hunt.classify = kind if wanted.get("collect") else lambda evidence: classify(release, evidence)
    start, batch = time.monotonic(), 0
    while not hunt.failure and (left := _left(wanted, hunt, time.monotonic() - start)):
        _batch(hunt, left, wanted, 1000 * wanted["seed"] + batch)
        batch += 1
        done = f"{hunt.sequences} sequences, {hunt.events} events, {time.monotonic() - start:.0f} s"
        print(f"fuzz: {where}: {done}", file=sys.stderr, flush=True)
    hunt.give_up()
    return {
        **wanted,
        "played": hunt.sequences,
        "different": len(hunt.ended),
        "audits": hunt.audits,
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


def _left(wanted: dict, hunt: Hunt, spent: float) -> int:
    if "seconds" in wanted:
        return TIMED if spent < wanted["seconds"] else 0
    if "ended" in wanted:
        left = wanted["ended"] - len(hunt.ended)
        return min(BATCH, max(FEWEST, left)) if left > 0 and hunt.sequences < 2 * wanted["ended"] else 0
    return min(BATCH, max(0, wanted["sequences"] - hunt.sequences))


def _batch(hunt: Hunt, sequences: int, wanted: dict, number: int) -> None:
    """So many sequences from one seed; what fails is left in `hunt`."""
    from hypothesis import seed
    from hypothesis.stateful import run_state_machine_as_test

    from .machine import DecodeMachine, Found, FoundLate, Machine, configured

    decodes = getattr(hunt.scheduler, "disagg_decode_prealloc_queue", None)
    machine = seed(number)(type("Machine", (DecodeMachine if decodes else Machine,), {"hunt": hunt}))
    with contextlib.suppress(Found, FoundLate):
        run_state_machine_as_test(machine, settings=configured(sequences, wanted["steps"], wanted.get("shrink", True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
