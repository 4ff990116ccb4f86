"""Pools that run out while a server speculates: what is counted is what SGLang's own functions then take.

Requests are prefilled, staged and verified as in `rig`; who may go on, who is retracted and who is refused is decided
by SGLang's scheduler and batch, and slots for drafts are taken by SGLang's `prepare_for_decode`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from types import SimpleNamespace

from lifecycle.pools import PAGE
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_hisparse_plugin import memory, upstream

from .rig import HOT_BUFFER, Rig

DRAFTS = 3


class Server(Rig):
    """A rig whose requests make one batch, of spec v2, that the scheduler updates before each step."""

    def __init__(self, scheduler: object, output: int = 32) -> None:
        super().__init__(scheduler, DRAFTS)
        kinds = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
        scheduler.spec_algorithm, scheduler.enable_overlap = kinds.EAGLE, True
        arguments = importlib.import_module("sglang.srt.server_args").get_global_server_args()
        arguments.speculative_num_steps, arguments.speculative_eagle_topk = DRAFTS - 1, 1
        vars(arguments)["max_speculative_num_draft_tokens"] = DRAFTS  # worked out when arguments are read
        self.output = output
        self.replies: list[object] = []
        sender = type(getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer)
        sender.send_output = lambda _, message, _req=None: self.replies.append(message)

    def admit(self, prompt: int) -> None:
        """Beside those that are verified, as `get_next_batch_to_run` leaves them."""
        self.scheduler.running_batch = self.batch()
        super().admit(prompt)

    def batch(self) -> ScheduleBatch:
        """Of all requests, as far as SGLang looks at it before a step."""
        for request in self.requests:
            self._settle_lengths(request)
        batch = upstream.batch_of(self.scheduler, [request.req for request in self.requests])
        tables = self._batch()
        batch.req_pool_indices, batch.seq_lens, batch.seq_lens_cpu = (
            tables.req_pool_indices,
            tables.seq_lens,
            tables.seq_lens.clone(),
        )
        batch.orig_seq_lens, batch.req_pool_indices_cpu = tables.seq_lens.int(), tables.req_pool_indices.clone()
        batch.output_ids = batch.input_ids = tables.seq_lens
        batch.model_config, batch.device = self.scheduler.model_config, "cpu"
        batch.spec_algorithm, batch.enable_overlap = self.scheduler.spec_algorithm, True
        batch.forward_mode, batch.return_logprob, batch.has_grammar = ForwardMode.DECODE, False, False
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, self.scheduler.model_config.vocab_size)
        batch.spec_info = Draft()
        return batch

    def update(self) -> None:
        """As before each decode step of the scheduler; who is retracted leaves the rig."""
        going_on = self.scheduler.update_running_batch(self.batch())
        self.requests = [request for request in self.requests if request.req in (going_on.reqs or [])]

    def ended(self, rid: str) -> list[str]:
        """What the client of a request that was refused is told."""
        outputs = [reply for reply in self.replies if rid in getattr(reply, "rids", ())]
        return [output.finished_reasons[output.rids.index(rid)]["message"] for output in outputs]

    def _submit(self, prompt: int) -> None:
        super()._submit(prompt)
        self.scheduler.waiting_queue[-1].sampling_params.max_new_tokens = self.output


class Draft(SimpleNamespace):
    """The draft model's answer: SGLang only takes out of it whoever leaves the batch."""

    verify_done = None

    def filter_batch(self, *_args: object, **_kwargs: object) -> None:
        pass

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        draft = importlib.import_module("sglang.srt.speculative.eagle_info").EagleDraftInput
        draft.prepare_for_decode(self, batch)


# --- what is counted ---


def counted(scheduler: object) -> dict[str, object]:
    """Random lengths: a step's slots are counted to the last one, and rows are right all the way."""
    server, steps = Server(scheduler, output=300), 0
    chance = random.Random(5)
    for _ in range(160):
        if not server.requests or (len(server.requests) < 3 and chance.random() < 0.2):
            server.admit(chance.choice((3, HOT_BUFFER - 2, HOT_BUFFER + 1, 130, 190)))
        before, batch = server.pools.sizes(), server.batch()
        needed = memory.step(server.coordinator, batch.reqs, upstream.tokens_ahead(batch))
        needed["logical"] = batch.new_tokens_required_next_decode()
        server.update()
        taken = {name: before[name] - now for name, now in server.pools.sizes().items() if name != "slots"}
        over = OVERESTIMATED if "logical" in OVERESTIMATED and needed["logical"] >= taken["logical"] else ()
        if any(needed[name] != taken[name] for name in taken if name not in over):
            server.found.append(f"counted {needed}, taken {taken}")
        server.step(chance)
        steps += 1
        server.audit()
        for request in [each for each in server.requests if each.length > 400]:
            server.finish(request)
    server.end()
    return {"found": [*server.findings()], "steps": steps}


OVERESTIMATED = () if hasattr(ScheduleBatch, "_new_tokens_required_next_decode_spec_v2") else ("logical",)
"""Of what SGLang itself asks for more than it takes: to 0.5.11."""


# --- a pool runs out ---


def host_runs_out(scheduler: object) -> dict[str, object]:
    """The host pool is full for two: the younger goes back to the queue before anything is taken."""
    server = two(scheduler)
    run_short(server, "host")
    return {"found": [*server.findings()]}


def device_full(scheduler: object) -> dict[str, object]:
    """A full device pool is nothing to a step that speculates: nobody is retracted."""
    server = two(scheduler)
    server.pools.hold_memory("device", keep=0)
    for seed in range(30):
        server.update()
        server.step(random.Random(seed))
    if len(server.requests) != 2:
        server.found.append("a request was retracted though it needed nothing")
    server.pools.release_memory()
    server.end()
    return {"found": [*server.findings()]}


def long_answer(scheduler: object) -> dict[str, object]:
    """Prompt and answer are longer than the device pool: the request is admitted, and goes past its end."""
    server = Server(scheduler, output=500)
    server.admit(600)
    while server.requests and server.requests[0].length < 1090 and not server.found:
        server.update()
        server.step(random.Random(server.requests[0].length))
    if not server.requests or server.requests[0].length < 1090:
        server.found.append("the request did not get there")
    server.end()
    return {"found": [*server.findings()]}


def buffer_counts(scheduler: object) -> dict[str, object]:
    """Whole buffers are counted: of three short prompts, two find room beside each other, the third waits."""
    server = Server(scheduler)
    server.pools.hold_memory("device", keep=2 * (HOT_BUFFER // PAGE + 1))
    for _ in range(3):
        server._submit(3)
    server.admit(3)
    waiting = len(server.scheduler.waiting_queue)
    if (len(server.requests), waiting) != (2, 1):
        server.found.append(f"{len(server.requests)} were admitted, {waiting} wait")
    for seed in range(4):
        server.update()
        server.step(random.Random(seed))
    server.finish(server.requests[0])
    server.admit(3)
    if len(server.requests) != 2:
        server.found.append("there is room, and the third still waits")
    server.pools.release_memory()
    server.end()
    return {"found": [*server.findings()]}


def waits_for_room(scheduler: object) -> dict[str, object]:
    """A short prompt stays staged while the device pool has no room for its buffer, and a long one passes it."""
    server = Server(scheduler)
    server.scheduler.running_batch = server.batch()
    server._submit(3)
    server._submit(2 * HOT_BUFFER)
    server.prefill(server.scheduler.get_new_batch_prefill())

    def join(*expected: str) -> None:
        joined = [req.rid for req in server.coordinator.collect_ready_reqs()]
        server.requests += [server.joining.pop(rid) for rid in joined]
        if joined != [*expected]:
            server.found.append(f"{joined} start to decode, not {[*expected]}")

    server.pools.hold_memory("device", keep=0)
    join("r1")
    for seed in range(3):
        server.update()
        server.step(random.Random(seed))
        join()
    server.pools.release_memory()
    join("r0")
    server.update()
    server.step(random.Random(3))
    server.end()
    return {"found": [*server.findings()]}


def never_fits(scheduler: object) -> dict[str, object]:
    """The host pool holds one prompt of two: the other is refused and told why."""
    server = Server(scheduler)
    server.pools.hold_memory("host", keep=4)
    server._submit(400)
    server.admit(400)
    told = server.ended("r0")
    if server.requests or len(told) != 1 or "host pool" not in told[0]:
        server.found.append(f"{len(server.requests)} were admitted, told was {told}")
    server.admit(100)
    if len(server.requests) != 1:
        server.found.append("the one for which there is room is not served")
    server.update()
    server.step(random.Random(0))
    server.pools.release_memory()
    server.end()
    return {"found": [*server.findings()]}


def uncounted(scheduler: object) -> dict[str, object]:
    """Control: as if nothing were taken ahead."""
    server = two(scheduler)
    before, upstream.tokens_ahead = [*server.findings()], lambda _holder: 0
    try:
        run_short(server, "host")
    except RuntimeError as error:
        server.found.append(str(error))
    return {"found": [*server.findings()], "before": before}


# --- parts of cases ---


def two(scheduler: object) -> Server:
    server = Server(scheduler, output=200)
    server.admit(2 * HOT_BUFFER)
    server.admit(2 * HOT_BUFFER + 9)
    for seed in range(3):
        server.update()
        server.step(random.Random(seed))
    return server


def run_short(server: Server, pool: str) -> None:
    """Take what is free of `pool`; one of two must be retracted, and come back when it is there again."""
    stays = server.requests[0].req.rid
    server.pools.hold_memory(pool, keep=0)
    for seed in range(60):
        server.update()
        if len(server.requests) < 2:
            break
        server.step(random.Random(seed))
    waiting = [req.rid for req in server.scheduler.waiting_queue]
    if len(server.requests) != 1 or len(waiting) != 1:
        server.found.append(f"{len(server.requests)} go on and {waiting} wait, of two")
    server.audit()
    for seed in range(3):
        server.step(random.Random(seed))
        server.update()
    if [request.req.rid for request in server.requests] != [stays] and waiting == [stays]:
        server.found.append("nobody went on")
    server.pools.release_memory()
    server.admit(1)  # instead of it the one that was retracted
    if len(server.requests) != 2:
        server.found.append("the retracted request did not come back")
    server.update()
    server.step(random.Random(1))
    server.end()


CASES: dict[str, Callable[[object], dict[str, object]]] = {
    "counted": counted,
    "host-runs-out": host_runs_out,
    "device-full": device_full,
    "long-answer": long_answer,
    "buffer-counts": buffer_counts,
    "waits-for-room": waits_for_room,
    "never-fits": never_fits,
    "control-uncounted": uncounted,
}
