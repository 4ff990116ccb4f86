"""In a process of one release: a real scheduler with the flags of a plan, and how many requests it decodes at once.

    python -m sizing.crowd PROMPT OUTPUT REQUESTS MOST FLAG...

Submits REQUESTS requests at once and prints the most that were decoding together, and how often any was retracted.
"""

from __future__ import annotations

import json
import os
import sys

from lifecycle import process, server


def main(prompt: str, output: str, requests: str, *flags: str) -> None:
    process._register()
    # A plan reckons with the share of future output that SGLang comes to reserve in the long run; this starts with it.
    scheduler = server.start("--disable-overlap-schedule", "--schedule-conservativeness=0.14", *flags)
    from lifecycle.world import World

    world = World(scheduler)
    everybody = [world.submit(f"request-{i}", int(prompt), int(output)) for i in range(int(requests))]
    most = 0

    def ended() -> bool:
        nonlocal most
        most = max(most, sum(world.decoding(req.rid) and not world.ends(req.rid) for req in everybody))
        return all(world.ends(req.rid) for req in everybody)

    world.run_until(ended, limit=1000)
    retracted = sum(getattr(req, "retraction_count", 0) for req in everybody)
    answered = sum(world.answered(req.rid) for req in everybody)
    print(json.dumps({"most": most, "retracted": retracted, "answered": answered}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
