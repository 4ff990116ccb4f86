"""Ranks: a process with the real start, the real gloo groups and the real event loop each.

    python -m lifecycle.ranks VARIANT STORY

Two of them share the heads of every request (tensor parallelism), or have requests of their own (DP attention); four
are two pairs, each with requests of its own, and share heads or, by prefill context parallelism, context. Or they are
the stages of a pipeline, see `stages.py`.

Prints JSON: the ranks that started, and by rank what happened there, or null for one that did not end in time.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import process, server, stages

START_S, STORY_S, HUNG_S = 240, 120, 10
"""How long a rank may take to start, which takes five seconds; for its story, which takes one or two; and where
nothing is patched, for then it hangs.
"""


@dataclass(frozen=True)
class Story:
    play: Callable[[object, int], object]
    """Of a world and its rank; returns what there is to tell."""
    ranks: int = 2
    alone: int = 0
    """Groups of ranks with requests of their own, by DP attention; 0: none."""
    context: int = 1
    """Ranks that share the context of a prompt, and so its requests."""
    staged: bool = False
    """Whether each rank has layers of its own: pipeline parallelism."""

    @property
    def flags(self) -> list[str]:
        if self.staged:
            return ["--pp-size", str(self.ranks)]
        parallel = ["--tp-size", str(self.ranks), "--attn-cp-size", str(self.context)]
        return [*parallel, "--dp-size", str(self.alone), "--enable-dp-attention"] if self.alone else parallel


def main(variant: str, story: str) -> None:
    if variant == "plugin":
        process._register()
    import sglang.srt.managers.scheduler  # noqa: F401  (once, for both ranks)

    told = STORIES[story]
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * (1 if told.staged else told.ranks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [_fork(rank, port, told) for rank in range(told.ranks)]
    readers = [reader for _, reader in started]
    ready = _read(readers, START_S)
    answers = _read(readers, HUNG_S if variant == "off" else STORY_S)
    for pid, _ in started:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    print(json.dumps({"started": ready, "answers": answers}), flush=True)
    os._exit(0)


def _fork(rank: int, port: int, story: Story) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        group = rank * story.alone // story.ranks if story.alone else None
        flags = "--disable-overlap-schedule", "--nccl-port", str(port), *story.flags
        place = {"stage": rank} if story.staged else {"rank": rank, "group": group}
        scheduler = server.start(*flags, **place)
        world = stages.world(scheduler, rank) if story.staged else _world(scheduler)
        with os.fdopen(writer, "w") as pipe:
            print(json.dumps(rank), file=pipe, flush=True)
            print(json.dumps(story.play(world, rank)), file=pipe, flush=True)
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
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    from .world import World

    nothing = GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.empty(0, dtype=torch.int64),
        can_run_cuda_graph=False,
    )

    class InStep(World):
        def __init__(self, scheduler) -> None:
            super().__init__(scheduler)
            self.decoded_in: dict[str, list[int]] = {}

        def _receive(self):
            arrived = super()._receive()
            torch.distributed.broadcast(torch.zeros(8), src=0)
            return arrived

        def _forward(self, batch, **_):
            if batch.forward_mode.is_idle():  # others of the DP attention compute
                return nothing
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


def own_requests(w, rank: int) -> dict[str, object]:
    """Each rank has its own. One has none; one is busy while another refuses what it can never hold, then retracts."""
    if rank == 1:
        w.arrive("alone", prompt=110, output=12)
    w.run(20)
    mine = ["alone"] if rank == 1 else ["busy"]
    if rank == 0:
        w.arrive("busy", prompt=110, output=60)
    w.run(8)
    if rank == 1:
        w.pools.hold_memory("host", keep=6)
        w.arrive("large", prompt=600, output=8)
    w.run(8)
    w.expect(rank == 1 or w.decoding("busy"), "the busy rank is so no more")
    if rank == 1:
        w.expect(
            w.ends("large") == ["abort"], f"what can never be held ended as {w.ends('large')} while others are busy"
        )
        w.pools.release_memory()
        w.arrive("stays", prompt=110, output=24)
        w.arrive("victim", prompt=120, output=20)
        mine += ["stays", "victim"]
    w.run(8)
    if rank == 1:
        w.expect(w.decoding("stays") and w.decoding("victim"), "not both decode")
        w.pools.hold_memory("logical", keep=0)
    w.run(8)
    w.expect(rank == 1 or w.decoding("busy"), "the busy rank is so no more")
    if rank == 1:
        w.expect(w.waiting("victim") == 1 and w.decoding("stays"), "not exactly the victim was retracted")
        w.pools.release_memory()
    w.run(80)
    w.expect_ended(*mine)
    w.expect_at_rest()
    return {"findings": w.findings}


def pairs(w, rank: int) -> dict[str, object]:
    """In the first pair of two, a request comes later to the staging of one rank; the other pair goes on meanwhile."""
    pair, late = divmod(rank, 2)
    mine = ["other", "first"][: 2 - pair]
    w.arrive("other", prompt=110, output=24)
    w.run(8)
    if not pair:
        w.arrive("first", prompt=200, output=12)
    w.run(1)
    queue = w.coordinator.ack_staging_queue
    held = [queue.pop() for _ in range(late and len(queue))]
    w.run(5)
    w.expect(pair == 1 or "first" not in w.decoded_in, "a rank did not wait for the one that was late")
    queue += held
    w.run(60)
    w.expect_ended(*mine)
    w.expect_at_rest()
    return {"decoded": {rid: w.decoded_in.get(rid) for rid in mine}, "findings": w.findings}


def _tell(w, *rids: str) -> dict[str, object]:
    """Run on to the end. In which iterations each request decoded, and what else was found."""
    w.run_until(lambda: all(w.ends(rid) for rid in rids))
    w.run(2)
    w.expect_ended(*rids)
    w.expect_at_rest()
    return {"decoded": {rid: w.decoded_in[rid] for rid in rids}, "findings": w.findings}


STORIES = {
    "different-ends": Story(different_ends),
    "empty-on-one": Story(empty_on_one),
    "own-requests": Story(own_requests, alone=2),
    "pairs": Story(pairs, ranks=4, alone=2),
    "pairs-of-context": Story(pairs, ranks=4, alone=2, context=2),
    **{name: Story(play, staged=True) for name, play in stages.STORIES.items()},
}


if __name__ == "__main__":
    main(*sys.argv[1:])
