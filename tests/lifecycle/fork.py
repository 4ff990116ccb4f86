"""Stories told in a copy of this process, which starts as the scheduler was built; what they break dies with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback

SILENCE_S = 60
"""A scheduler that has not come round by then never will."""

AGAIN = "again"
"""The event after which a server that came to rest plays the next sequence."""


class Fork:
    def __init__(self, scheduler) -> None:
        from . import script, world  # noqa: F401  (once, for every fork; SGLang may have been patched only now)

        mine, theirs = os.pipe(), os.pipe()
        self.audits = 0
        """Iterations after which pools and rows were audited, as the copy counts them."""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(mine[1])
            os.close(theirs[0])
            _serve(scheduler, os.fdopen(mine[0]), os.fdopen(theirs[1], "w"))
        os.close(mine[0])
        os.close(theirs[1])
        self.requests, self.answers = os.fdopen(mine[1], "w"), os.fdopen(theirs[0])

    def play(self, line: str) -> list[str]:
        """The evidence of what went wrong in this event."""
        try:
            print(line, file=self.requests, flush=True)
        except BrokenPipeError:
            return ["the process has ended"]
        if not select.select([self.answers], [], [], SILENCE_S)[0]:
            return [f"the scheduler hangs in {line!r}"]
        answer = self.answers.readline()
        if not answer:
            return ["the process ended in the middle"]
        evidence, self.audits = json.loads(answer)
        return evidence

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for pipe in (self.requests, self.answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _serve(scheduler, requests, answers) -> None:
    from .script import Story
    from .world import World

    try:
        world = World(scheduler)
        story = Story(world)
        for line in requests:
            if line.strip() == AGAIN:
                world.again()
                story = Story(world)
            print(json.dumps((story.play(line), world.pools.audits)), file=answers, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
