"""Two tensor-parallel ranks: two processes with the real start, the real gloo groups and the real event loop each.

    python -m lifecycle.ranks VARIANT STORY

Prints JSON: the ranks that started, and by rank what happened there, or null for one that did not end in time.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time

from . import process, server

RANKS = 2
START_S, STORY_S = 120, 10
"""How long a rank may take to start, which takes five seconds, and then for its story, which takes one."""


def main(variant: str, story: str) -> None:
    if variant == "plugin":
        process._register()
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for both ranks)

    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * RANKS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [_fork(rank, port, STORIES[story]) for rank in range(RANKS)]
    readers = [reader for _, reader in started]
    ready = _read(readers, START_S)
    answers = _read(readers, STORY_S)
    for pid, _ in started:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(json.dumps({"started": ready, "answers": answers}), flush=True)
    os._exit(0)


def _fork(rank: int, port: int, story) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        scheduler = server.start(
            "--disable-overlap-schedule", "--tp-size", str(RANKS), "--nccl-port", str(port), rank=rank
        )
        world = _world(scheduler)
        with os.fdopen(writer, "w") as pipe:
            print(json.dumps(rank), file=pipe, flush=True)
            print(json.dumps(story(world, rank)), file=pipe, flush=True)
            time.sleep(STORY_S)  # the other rank may still talk to this one
    os.close(writer)
    return child, reader


def _read(readers: list[int], seconds: float) -> list[object]:
    """From each rank one line of JSON; None for one that does not come in time."""
    deadline = time.monotonic() + seconds
    lines = [b""] * len(readers)
    for i, reader in enumerate(readers):
        while not lines[i].endswith(b"\n"):
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            byte = os.read(reader, 1) if ready else b""
            if not byte:
                break
            lines[i] += byte
    return [json.loads(line) if line.endswith(b"\n") else None for line in lines]


def _world(scheduler):
    """A world in which all ranks start each iteration together, as SGLang's do to share out what has arrived."""
    import torch

    from .world import World

    class InStep(World):
        def __init__(self, scheduler) -> None:
            super().__init__(scheduler)
            self.decoded_in: dict[str, list[int]] = {}

        def _receive(self):
            arrived = super()._receive()
            torch.distributed.broadcast(torch.zeros(8), src=0, group=self.coordinator.tp_group)
            return arrived

        def _forward(self, batch, **_):
            if batch.forward_mode.is_decode():
                for req in batch.reqs:
                    self.decoded_in.setdefault(req.rid, []).append(self.turn)
            return super()._forward(batch)

    return InStep(scheduler)


def different_ends(w, rank: int) -> dict[str, object]:
    """The transfers of two requests end in different iterations on the two ranks, and in another order."""
    first, second = w.submit("first", prompt=200, output=12), w.submit("second", prompt=120, output=12)
    w.run_until(lambda: w.staging("first") and w.staging("second"))
    w.hold_staging()
    for turn in range(8):
        queue = w.coordinator.ack_staging_queue
        done = w.coordinator.write_staging_stream.record_event()
        ended = {0: {2: [second], 4: [first]}, 1: {1: [first], 6: [second]}}[rank].get(turn, [])
        queue[:] = [act._replace(finish_event=done) if act.req in ended else act for act in queue]
        w.run(1)
    return _tell(w, "first", "second")


def empty_on_one(w, rank: int) -> dict[str, object]:
    """One rank comes to the staging of a request five iterations later than the other; both are busy with another."""
    w.submit("other", prompt=110, output=24)
    w.run_until(lambda: w.decoding("other"))
    w.submit("first", prompt=200, output=12)
    w.run_until(lambda: w.staging("first"))
    queue = w.coordinator.ack_staging_queue
    late = [queue.pop() for _ in range(rank)]
    w.run(5)
    queue += late
    return _tell(w, "first", "other")


def _tell(w, *rids: str) -> dict[str, object]:
    """Run on to the end. In which iterations each request decoded, and what else was found."""
    w.run_until(lambda: all(w.ends(rid) for rid in rids))
    w.run(2)
    w.expect_ended(*rids)
    w.expect_at_rest()
    return {"decoded": {rid: w.decoded_in[rid] for rid in rids}, "findings": w.findings}


STORIES = {"different-ends": different_ends, "empty-on-one": empty_on_one}


if __name__ == "__main__":
    main(*sys.argv[1:])
