"""A scheduler under observation: it runs its own event loop, and after every iteration its pools are audited.

The only thing computed here is what a model would: for every token, its KV row in each layer. A request's tokens are
consecutive ids, so that every row and every answer is known before anything runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hisparse_plugin.admission import Admission

from . import logprobs
from .pools import Pools, content, differ, slot_of, some
from .server import PAGE, SLOTS, TOP_K, VOCABULARY
from .transfers import ADDRESS, Prefill

SPAN = 1000
"""Ids from one request's first token to the next one's."""


class HeldEvent:
    """The end of a staging transfer that has not come yet."""

    def query(self) -> bool:
        return False


class World:
    def __init__(self, scheduler) -> None:
        self.scheduler, self.coordinator = scheduler, scheduler.hisparse_coordinator
        self.pools = Pools(scheduler)
        self.requests: dict[str, Req] = {}
        self.replies: list[object] = []
        self.backups: Counter[int] = Counter()
        """How often each host row was written from the device."""
        self.found: dict[str, int] = {}
        self.skipped = ""
        self.inbox: list[object] = []
        self._ends: dict[str, list[str]] = {}
        self._streamed: dict[str, list[int]] = {}
        self._logprobs: dict[str, logprobs.Got] = {}
        self._read = 0
        """Replies of which ends and tokens are known."""
        self._patched = ScheduleBatch.check_decode_mem, Admission.lacking
        self.turn = self.turns_left = 0
        self.loop = threading.Thread(target=self._go_round, daemon=True)
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self._attach()
        decodes = getattr(scheduler, "disagg_decode_prealloc_queue", None)
        self.prefill = Prefill(self) if decodes else None

    def again(self) -> None:
        """Begin anew with the same scheduler, which is idle: nothing is known of what was before."""
        ScheduleBatch.check_decode_mem, Admission.lacking = self._patched
        for known in (self.requests, self.replies, self.backups, self.found, self.inbox):
            known.clear()
        self._ends.clear()
        self._streamed.clear()
        self._logprobs.clear()
        self.turn = self._read = 0
        self.prefer_priority(False)
        if self.prefill:
            self.prefill.again()

    # --- driving ---

    def submit(self, rid: str, prompt: int, output: int, priority: int | None = None, **more: object) -> Req:
        """Queue a request of `prompt` tokens that will answer with exactly `output` more, and asks for `more`."""
        first = 100 + SPAN * len(self.requests)
        ids = list(range(first, first + prompt))
        sampling = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        text = {"origin_input_text": "", "origin_input_ids": array("q", ids) if _wants_arrays() else ids}
        req = Req(rid=rid, sampling_params=sampling, vocab_size=VOCABULARY, priority=priority, **text, **more)
        logprobs.no_prompt(req)
        self.requests[rid] = req
        self.scheduler._add_request_to_queue(req)
        return req

    def arrive(self, rid: str, prompt: int, output: int, priority: int | None = None, **more: object) -> None:
        """Have such a request come from the tokenizer: SGLang checks its length, and may answer with an error.

        EOS never comes; a request that would not ignore it is admitted by other estimates of SGLang's.
        """
        first = 100 + SPAN * len(self.requests) + SPAN * len(self.inbox)
        ids = list(range(first, first + prompt))
        sampling = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=more.pop("ignore_eos", True))
        sampling.normalize(None)
        io_struct = importlib.import_module("sglang.srt.managers.io_struct")
        message = io_struct.TokenizedGenerateReqInput
        fields = {
            **dict.fromkeys(("input_embeds", "token_type_ids", "token_ids_logprob", "mm_inputs")),
            **{"rid": rid, "input_text": "", "sampling_params": sampling, "priority": priority},
            "input_ids": array("q", ids) if _wants_arrays() else ids,
            **{"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": True},
            **more,
        }
        if self.prefill:
            fields |= ADDRESS | {"bootstrap_room": 1 + len(self.requests) + len(self.inbox)}
        known = _fields(message)
        self.inbox.append(message(**{name: value for name, value in fields.items() if name in known}))

    def run(self, turns: int) -> None:
        """Let the scheduler's event loop go round `turns` times."""
        self.turns_left = turns
        if not self.loop.is_alive() and not self.error:
            self.loop.start()
        self.go.release()
        self.done.acquire()
        if self.error:
            raise self.error

    def run_until(self, condition: Callable[[], object], limit: int = 200) -> None:
        """Go round until `condition()`; to be needed more than `limit` times is a finding."""
        for _ in range(limit):
            if condition():
                return
            self.run(1)
        self.expect(False, f"what was waited for did not come in {limit} iterations")

    def pause(self, mode: str = "retract") -> None:
        self._tell("PauseGenerationReqInput", mode=mode)

    def resume(self) -> None:
        self._tell("ContinueGenerationReqInput")

    def abort(self, rid: str) -> None:
        self._tell("AbortReq", rid=rid)

    def abort_all(self) -> None:
        self._tell("AbortReq", abort_all=True)

    def flush(self) -> bool:
        """Ask for the cache to be flushed; whether it was."""
        before = len(self.replies)
        self._tell("FlushCacheReqInput")
        (answer,) = [r.success for r in self.replies[before:] if type(r).__name__ == "FlushCacheReqOutput"]
        return answer

    def hold_staging(self) -> None:
        """Keep every staging transfer that is under way from ending."""
        self._replace_finish_events(HeldEvent())

    def release_staging(self, oldest: int | None = None) -> None:
        """Let the transfers end, all or the `oldest` so many."""
        self._replace_finish_events(self.coordinator.write_staging_stream.record_event(), oldest)

    def run_short(self) -> None:
        """The next time the scheduler asks whether the running requests have memory for one more token, say no."""
        original = ScheduleBatch.check_decode_mem

        def once(*args, **kwargs) -> bool:
            ScheduleBatch.check_decode_mem = original
            original(*args, **kwargs)
            return False

        ScheduleBatch.check_decode_mem = once

    @property
    def short(self) -> bool:
        """Whether that has not come yet."""
        return ScheduleBatch.check_decode_mem is not self._patched[0]

    def prefer_priority(self, preferred: bool = True) -> None:
        """As with --enable-priority-scheduling."""
        self.scheduler.enable_priority_scheduling = self.scheduler.enable_priority_preemption = preferred
        self.scheduler.policy.enable_priority_scheduling = preferred

    def corrupt_host_row(self, rid: str, token: int) -> None:
        """Change one KV row of a request behind everybody's back."""
        where = self.coordinator.req_to_host_pool[slot_of(self.requests[rid]), token]
        self.pools.host_rows()[0][where] += 1

    def give_speculative_workspace(self, capacity: int = PAGE) -> bool:
        """Let requests hold device slots from their first chunk on, as when speculating; False if none ever does."""
        swap = getattr(self.coordinator, "spec_swap", None)
        if swap is None:
            return False
        swap.enabled, swap.scratch_capacity = True, capacity
        swap.req_to_scratch = torch.zeros((len(self.pools.layers), SLOTS + 1, capacity), dtype=torch.int32)
        return True

    # --- PD disaggregation ---

    def disaggregated(self) -> None:
        """As on a decode worker, as far as the result of a batch goes."""
        mode = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode.DECODE
        processor = getattr(self.scheduler, "batch_result_processor", self.scheduler)
        object.__setattr__(processor, "disaggregation_mode", mode)
        for name in ("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"):
            setattr(self.scheduler, name, SimpleNamespace(queue=[], retracted_queue=[]))

    def transferred(self, rid: str, prompt: int, output: int) -> Req:
        """A request with slots as a decode worker allocates them, its KV in the host pool, and its first token."""
        req = self.submit(rid, prompt, output)
        self.scheduler.waiting_queue.remove(req)
        queue = object.__new__(importlib.import_module("sglang.srt.disaggregation.decode").DecodePreallocQueue)
        queue.scheduler, queue.tree_cache = self.scheduler, self.scheduler.tree_cache
        queue.req_to_token_pool = self.scheduler.req_to_token_pool
        queue.token_to_kv_pool_allocator = self.scheduler.token_to_kv_pool_allocator
        queue.token_to_kv_pool = queue.token_to_kv_pool_allocator.get_kvcache()
        queue._pre_alloc(req)
        tokens = torch.tensor(list(req.origin_input_ids))
        where = self.coordinator.req_to_host_pool[slot_of(req), :prompt]
        for layer, rows in enumerate(self.pools.host_rows()):
            rows[where] = content(tokens, layer)
        req.output_ids.append(int(tokens[-1]) + 1)
        return req

    def drop(self, req: Req) -> None:
        """Give up what the scheduler, not the coordinator, holds of a request."""
        release = importlib.import_module("sglang.srt.mem_cache.common").release_kv_cache
        flag = {"checkpoint", "is_insert"} & set(inspect.signature(release).parameters)
        release(req, self.scheduler.tree_cache, **dict.fromkeys(flag, False))

    # --- looking ---

    def decoding(self, rid: str) -> bool:
        return self.requests[rid] in self.scheduler.running_batch.reqs

    def waiting(self, rid: str) -> int:
        """How often the request is in the waiting queue."""
        return sum(req.rid == rid for req in self.scheduler.waiting_queue)

    def staging(self, rid: str) -> bool:
        return any(act.req.rid == rid for act in self.coordinator.ack_staging_queue)

    def ends(self, rid: str) -> list[str]:
        """Every end of the request that was reported, by kind."""
        self._read_replies()
        return self._ends.get(rid, [])

    def streamed(self, rid: str) -> list[int]:
        """The tokens that its client got, as they came."""
        self._read_replies()
        return self._streamed.get(rid, [])

    def logprobs(self, rid: str) -> logprobs.Got:
        """The logprobs that its client got."""
        self._read_replies()
        return self._logprobs.get(rid, logprobs.Got())

    def reasons(self, rid: str) -> Iterator[dict]:
        """Why the request ended, as its client is told."""
        for reply in self.replies:
            if type(reply).__name__ == "AbortReq" and reply.rid == rid and reply.finished_reason:
                yield reply.finished_reason
            elif hasattr(reply, "finished_reasons"):
                named = zip(reply.rids, reply.finished_reasons, strict=True)
                yield from (reason for name, reason in named if name == rid and reason)

    def _read_replies(self) -> None:
        for reply in self.replies[self._read :]:
            if type(reply).__name__ == "AbortReq":
                self._ends.setdefault(reply.rid, []).append("abort")
            elif hasattr(reply, "finished_reasons"):
                rows = zip(reply.rids, reply.finished_reasons, reply.output_ids, strict=True)
                for row, (name, reason, tokens) in enumerate(rows):
                    self._streamed.setdefault(name, []).extend(tokens)
                    if reply.output_token_logprobs_val:
                        self._logprobs.setdefault(name, logprobs.Got()).add(reply, row)
                    if reason:
                        self._ends.setdefault(name, []).append(reason["type"])
        self._read = len(self.replies)

    def prompt_length(self, rid: str) -> int:
        """Tokens of a request that a prefill worker computes: again after a retraction, then with those it had."""
        req = self.requests[rid]
        again = getattr(req, "pd_rebootstrap_in_progress", False)
        return len(req.origin_input_ids) + len(req.output_ids) * again

    def answered(self, rid: str) -> bool:
        """Whether the answer is exactly what the request asked for; SGLang may have cut that to its limit, or to -1."""
        req = self.requests[rid]
        first = self.first_token(rid)
        return list(req.output_ids) == list(range(first, first + max(1, req.sampling_params.max_new_tokens)))

    def first_token(self, rid: str) -> int:
        """The right answer begins with it, and goes on with the next ids."""
        prompt = self.requests[rid].origin_input_ids
        return prompt[0] + len(prompt)

    # --- judging ---

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.found.setdefault(what, self.turn)

    def expect_ended(self, *rids: str) -> None:
        """Each request has ended once, with the answer known beforehand."""
        for rid in rids:
            self.expect(self.ends(rid) == ["length"], f"{rid} ended as {self.ends(rid)}, not once by its length")
            self.expect(self.answered(rid), f"{rid} answered {list(self.requests[rid].output_ids)}")

    def expect_at_rest(self) -> None:
        """The pools are as they were, and nothing is remembered of anybody."""
        sizes, at_rest = self.pools.sizes(), self.pools.at_rest
        self.expect(sizes == at_rest, f"pools have {sizes} free, at the start {at_rest}")
        self.expect(not self.coordinator.ack_staging_queue, "the staging queue is not empty")
        self._note(self.pools.audit(self.requests))

    def inapplicable(self, why: str) -> None:
        """There is no such thing in this release."""
        self.skipped = why

    @property
    def findings(self) -> list[str]:
        """What was not as expected, each once."""
        return [f"{what} (first in iteration {turn})" for what, turn in self.found.items()]

    def _note(self, wrong: Iterable[str]) -> None:
        for what in wrong:
            self.expect(False, what)

    # --- standing in ---

    def _attach(self) -> None:
        """Take the model's place, the tokenizer's, and a look at every backup."""
        self.scheduler.model_worker.forward_batch_generation = self._forward
        senders = "sglang.srt.managers.scheduler_components.output_sender", "sglang.srt.managers.scheduler"
        _first(*senders).SenderWrapper.send_output = lambda _, output, recv_obj=None: self.replies.append(output)
        receiver = getattr(self.scheduler, "request_receiver", self.scheduler)
        type(receiver).recv_requests = lambda *_, **__: self._receive()
        backup = self.pools.host.backup_from_device_all_layer

        def counted(pool, host_indices, *args, **kwargs):
            self.backups.update(host_indices.tolist())
            return backup(pool, host_indices, *args, **kwargs)

        self.pools.host.backup_from_device_all_layer = counted
        queue = self.scheduler._add_request_to_queue

        def met(req, *args, **kwargs):
            self.requests[req.rid] = req
            return queue(req, *args, **kwargs)

        self.scheduler._add_request_to_queue = met

    def _tell(self, message: str, **fields: object) -> None:
        """Have a message arrive from the tokenizer, and go round once."""
        self.inbox.append(getattr(importlib.import_module("sglang.srt.managers.io_struct"), message)(**fields))
        self.run(1)

    def _replace_finish_events(self, event: object, oldest: int | None = None) -> None:
        queue = self.coordinator.ack_staging_queue
        begun = [act.start_event is not act.finish_event for act in queue]  # or for want of room there is no transfer
        queue[:oldest] = [
            act._replace(finish_event=event) if has else act for act, has in zip(queue[:oldest], begun, strict=False)
        ]

    def _go_round(self) -> None:
        self.go.acquire()
        try:
            self.scheduler.run_event_loop()
        except BaseException as error:
            self.error = error
        self.done.release()

    def _receive(self) -> list[object]:
        """Called by the event loop at the start of each iteration; here it waits to be let go on."""
        if self.turn:
            self._note(self.pools.audit(self.requests))
            for act in self.coordinator.ack_staging_queue:
                if act.start_event is act.finish_event:  # for want of room nothing was begun
                    continue
                self._note(f"{act.req.rid}, staging: {what}" for what in self.pools.check_staged(act.req))
        if self.turns_left == 0:
            self.done.release()
            self.go.acquire()
        self.turns_left -= 1
        self.turn += 1
        inbox, self.inbox = self.inbox, []
        return inbox

    def _forward(self, batch, **_):
        """Write the KV rows of the batch's tokens; in decode, also read as attention would, through the hot buffer."""
        slots, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        tokens, counts = batch.input_ids.clone(), [1] * len(slots)
        self.coordinator.num_real_reqs.fill_(len(slots))
        if hasattr(self.coordinator, "wait_for_pending_backup"):
            self.coordinator.wait_for_pending_backup()
        if not batch.forward_mode.is_decode():
            counts = [int(n) for n in getattr(batch, "extend_seq_lens", None) or batch.extend_lens]
        slot_per_token = [slot for slot, n in zip(slots, counts, strict=True) for _ in range(n)]
        positions = [p for length, n in zip(lengths, counts, strict=True) for p in range(length - n, length)]
        where = self.pools.mapping[self.scheduler.req_to_token_pool.req_to_token[slot_per_token, positions].long()]
        self.expect(bool((where > 0).all()), "a token has no device slot to be written to")
        for layer, rows in enumerate(self.pools.device_rows()):
            rows[where] = content(tokens, layer)
        if batch.forward_mode.is_decode():
            self._attend(batch, slots, lengths, tokens.tolist())
        following = tokens[torch.tensor(counts).cumsum(0) - 1] + 1
        output = logprobs.sampled(self.scheduler.tp_worker.model_runner.sampler, batch, counts, following)
        return GenerationBatchResult(logits_output=output, next_token_ids=following, can_run_cuda_graph=False)

    def _attend(self, batch, slots: list[int], lengths: list[int], newest: list[int]) -> None:
        """Look some tokens of each request up, the newest and others each time, and check what is found."""
        wanted = torch.full((len(slots), TOP_K), -1, dtype=torch.int32)
        anywhere = self.turn * 37 + torch.arange(TOP_K - 1) * 29
        for row, length in enumerate(lengths):
            picked = torch.cat([torch.tensor([length - 1]), anywhere % length]).unique()
            wanted[row, : len(picked)] = picked
        names = {slot_of(req): rid for rid, req in self.requests.items()}
        for layer, rows in enumerate(self.pools.device_rows()):
            found = self.coordinator.swap_in_selected_pages(batch.req_pool_indices, batch.seq_lens, wanted, layer)
            for row, length in enumerate(lengths):
                asked, got = (table[row][wanted[row] >= 0].long() for table in (wanted, found))
                right = content(asked + newest[row] - length + 1, layer)
                if wrong := asked[(got <= 0) | differ(rows[got.clamp(min=0)], right)].tolist():
                    self.expect(False, f"{names.get(slots[row])}: attention read wrong rows for tokens {some(wrong)}")
        for slot, length in zip(slots, lengths, strict=True):
            if slot in names:
                wrong_rows = self.pools.check_host(self.requests[names[slot]], length - 1)
                self._note(f"{names[slot]}: {what}" for what in wrong_rows)


@functools.cache
def _fields(message: type) -> frozenset[str]:
    return frozenset(inspect.signature(message).parameters)


@functools.cache
def _wants_arrays() -> bool:
    return "array" in str(Req.__init__.__annotations__.get("origin_input_ids", ""))


def _first(*modules: str):
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(" or ".join(modules))
