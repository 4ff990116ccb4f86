"""A story told in a copy of this process, which starts as the scheduler was built; what it breaks dies with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import traceback

SILENCE_S = 60
"""A scheduler that has not come round by then never will."""


class Fork:
    def __init__(self, scheduler) -> None:
        mine, theirs = os.pipe(), os.pipe()
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
        return json.loads(answer) if answer else ["the process ended in the middle"]

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
        story = Story(World(scheduler))
        for line in requests:
            print(json.dumps(story.play(line)), file=answers, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
