"""Draft tokens on the real pools, coordinator and scheduler of a release, moved byte by byte.

What a model would compute is replaced by a KV row that nobody wrote before; `Request.rows` knows which, by position.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from lifecycle import server
from lifecycle.pools import PAGE, Pools, content, slot_of, some
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_hisparse_plugin import upstream
from sglang_hisparse_plugin.speculative.rows import VerifyRows

TOP_K, HOT_BUFFER, OUTPUT = 32, 128, 32


def start():
    """A scheduler whose hot buffer is as large as what four draft tokens select."""
    server.MODEL["index_topk"] = TOP_K
    config = f'{{"top_k": {TOP_K}, "device_buffer_size": {HOT_BUFFER}, "host_to_device_ratio": 2}}'
    whole = ("--chunked-prefill-size", "-1")  # several that come back together are one prefill, not parts of it
    return server.start("--disable-overlap-schedule", *whole, "--hisparse-config", config)


@dataclass
class Request:
    req: Req
    length: int
    """Committed tokens."""
    rows: dict[int, int] = field(default_factory=dict)
    """Position -> number of the row that was last written for it."""
    host: dict[int, int] = field(default_factory=dict)
    """Position -> host slot it has had."""


class Rig:
    def __init__(self, scheduler, steps: int) -> None:
        self.scheduler, self.coordinator = scheduler, scheduler.hisparse_coordinator
        self.pools = Pools(scheduler)
        arguments = importlib.import_module("sglang.srt.server_args").get_global_server_args()
        arguments.speculative_algorithm, arguments.speculative_num_draft_tokens = "EAGLE", steps
        self.rows = self.coordinator.verify_rows = VerifyRows(self.coordinator, steps)
        self.steps = steps
        self.requests: list[Request] = []
        self.every: dict[str, Req] = {}
        self.written = 0
        self.skip_settle = False
        """Leave the next `settle` out: a control."""
        self.boundary = self.answered = self.aborted = self.reused = 0
        """Steps that crossed the hot buffer's end; rows looked at; requests aborted; admitted to a slot used before."""
        self._slots: set[int] = set()
        self.found: list[str] = []

    # --- a request's life ---

    def admit(self, prompt: int) -> None:
        """Prefill a new request, one way or the other: it may be a retracted one's turn."""
        if not self.scheduler.waiting_queue:
            self._submit(prompt)
        batch = self.scheduler.get_new_batch_prefill()
        if batch is None:
            return
        self.prefill(batch)
        for req in self.coordinator.collect_ready_reqs():
            self.requests.append(self.joining.pop(req.rid))

    def prefill(self, batch) -> None:
        """Write the prompt's rows and let SGLang process the result; its requests are staged then."""
        slots = [slot_of(req) for req in batch.reqs]
        lengths = [int(n) for n in batch.seq_lens]
        self.joining = {}
        self.reused += len(self._slots & set(slots))
        self._slots |= set(slots)
        for req, slot, length in zip(batch.reqs, slots, lengths, strict=True):
            request = self.joining[req.rid] = Request(req, length)
            logical = self.scheduler.req_to_token_pool.req_to_token[slot, :length].long()
            self._write(request, range(length), self.pools.mapping[logical])
        draft = torch.arange(len(slots))
        batch.spec_info = SimpleNamespace(topk_p=draft, topk_index=draft, hidden_states=draft[:, None])
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.full((len(slots),), 7),
            can_run_cuda_graph=False,
        )
        self.scheduler.process_batch_result(batch, result)
        for request in self.joining.values():
            self._check_count(request)

    def finish(self, request: Request) -> None:
        """As SGLang ends a request: tell the coordinator, then free its slots."""
        self._settle_lengths(request)
        self.coordinator.request_finished(request.req)
        importlib.import_module("sglang.srt.mem_cache.common").release_kv_cache(request.req, self.scheduler.tree_cache)
        self.requests.remove(request)

    def retract(self, request: Request) -> None:
        """As SGLang retracts a request, which will be prefilled anew."""
        self._settle_lengths(request)
        upstream.retract(self.scheduler, [request.req])
        self.requests.remove(request)

    def preempt(self, request: Request) -> None:
        """As SGLang makes room for a request of higher priority, which comes and stays away here."""
        policy = importlib.import_module("sglang.srt.managers.schedule_policy").PrefillAdder
        self._settle_lengths(request)
        arguments = self.scheduler.server_args
        sign = 1 if arguments.schedule_low_priority_values_first else -1
        request.req.priority = 1
        wants = {"extend_input_len": 1, "full_untruncated_fill_ids": [0], "prefix_indices": []}  # by release
        high = SimpleNamespace(priority=1 - 99 * sign, sampling_params=request.req.sampling_params, **wants)
        batch = upstream.batch_of(self.scheduler, [request.req])
        batch.filter_batch = lambda keep_indices: None
        adder = SimpleNamespace(
            running_batch=batch,
            preempt_list=[],
            priority_scheduling_preemption_threshold=0,
            rem_total_tokens=0,
            rem_total_token_offset=0,
            _get_running_request_total_token_offset=lambda req: 1 << 20,
        )
        if not policy.preempt_to_schedule(adder, high, arguments):
            self.found.append(f"{request.req.rid} was not preempted")
        self.scheduler._add_request_to_queue(request.req)
        self.requests.remove(request)

    def abort(self, request: Request) -> None:
        """As a client gives up a request that decodes: SGLang marks it, and ends it with the result of its step."""
        self.mark_aborted(request)
        self._end_aborted()

    def mark_aborted(self, request: Request) -> None:
        """What SGLang does when the client's message comes."""
        message = importlib.import_module("sglang.srt.managers.io_struct").AbortReq(rid=request.req.rid)
        running = self.scheduler.running_batch
        before, running.reqs = running.reqs, [each.req for each in self.requests]
        self.scheduler.abort_request(message)
        running.reqs = before

    def _end_aborted(self) -> None:
        """What SGLang does when a step's result comes."""
        ended = 0
        for request in [each for each in self.requests if each.req.to_finish]:
            (
                request.req.check_finished
                if hasattr(request.req, "check_finished")
                else request.req.update_finish_state
            )()
            ended += request.req.finished()
            self.finish(request)
        self.aborted += ended
        if not ended:
            self.found.append("an abort ended nothing")

    # --- a step ---

    def step(self, chance: random.Random, leave: str = "", padding: int = 0, finish: int | None = None) -> None:
        """One verification of every request.

        Args:
            leave: "finish", "retract", "preempt" or "abort": what happens to the first request between its queries and
                their end. One that is aborted stays until then.
            padding: rows of the batch that belong to no request.
            finish: the place of one that ends when the batch has been made and before it is run, as a request with a
                grammar may. Another takes what it leaves, if there is one.
        """
        self.rows.prepare([self._reserve(request, request.length + self.steps) for request in self.requests])
        batch, verified = self._batch(), [*self.requests]
        if finish is not None:
            self.finish(verified[finish])
            self.admit(2 * HOT_BUFFER)
        before = self.pools.mapping.clone()
        self.rows.bind(batch)
        for i, request in enumerate(verified):
            locs = batch.out_cache_loc.view(-1, self.steps)[i]
            if request not in self.requests:
                if not torch.equal(self.pools.mapping[locs], before[locs]):
                    self.found.append(f"{request.req.rid} is gone, and its draft tokens are given rows")
                continue
            drafts = range(request.length, request.length + self.steps)
            self._write(request, drafts, self.pools.mapping[locs])
            self.boundary += drafts[0] <= HOT_BUFFER < drafts[-1]
        self._attend(batch, verified, chance, padding)
        if leave == "abort":
            self.mark_aborted(self.requests[0])
        elif leave:
            getattr(self, leave)(self.requests[0])
            batch = self._batch()
        if not self.skip_settle:
            self.rows.settle(batch)
            if bool(self.pools.mapping[batch.out_cache_loc].any()):
                self.found.append("a draft token's logical slot still leads to a device row")
        self.skip_settle = False
        upstream.settled(self.coordinator)
        for request in [each for each in verified if each in self.requests]:
            request.length += chance.randint(1, self.steps)
            self._check_host(request)
        if leave == "abort":
            self._end_aborted()

    def _reserve(self, request: Request, length: int) -> tuple[int, int]:
        """Logical slots as spec v2 takes them, a page at a time; its slot, and how many it has now."""
        slot, table = slot_of(request.req), self.scheduler.req_to_token_pool.req_to_token
        have = upstream.allocated_len(request.req)
        for position in range(have, length):
            first = position % PAGE == 0
            table[slot, position] = self.pools.logical.alloc(PAGE)[0] if first else table[slot, position - 1] + 1
        holder = request.req if hasattr(request.req, "kv_allocated_len") else request.req.kv
        holder.kv_allocated_len = max(have, length)
        return slot, holder.kv_allocated_len

    def _batch(self) -> SimpleNamespace:
        slots = torch.tensor([slot_of(request.req) for request in self.requests], dtype=torch.int64)
        lengths = torch.tensor([request.length for request in self.requests], dtype=torch.int64)
        table = self.scheduler.req_to_token_pool.req_to_token
        locs = [table[s, n : n + self.steps].long() for s, n in zip(slots.tolist(), lengths.tolist(), strict=True)]
        return SimpleNamespace(
            req_pool_indices=slots, seq_lens=lengths, out_cache_loc=torch.cat(locs) if locs else slots
        )

    def _write(self, request: Request, positions: range, where: torch.Tensor) -> None:
        if not bool((where > 0).all()):
            self.found.append("a token has no device row to be written to")
        numbers = torch.arange(self.written, self.written + len(positions))
        self.written += len(positions)
        request.rows.update(zip(positions, numbers.tolist(), strict=True))
        for layer, rows in enumerate(self.pools.device_rows()):
            rows[where] = content(numbers, layer)

    def _attend(self, batch, verified: list[Request], chance: random.Random, padding: int) -> None:
        """Ask for random tokens in every layer, and look at all answers when the last query has its."""
        count = len(verified)
        self.coordinator.num_real_reqs.fill_(count)
        asked = batch
        if padding:
            pad = torch.zeros(padding, dtype=torch.int64)
            slots, lengths = torch.cat([batch.req_pool_indices, pad]), torch.cat([batch.seq_lens, pad + 1])
            asked = SimpleNamespace(req_pool_indices=slots, seq_lens=lengths)
            self.rows.lengths[:, count : count + padding] = 1
        for layer, rows in enumerate(self.pools.device_rows()):
            selected = torch.full(((count + padding) * self.steps, TOP_K), -1, dtype=torch.int32)
            for i, request in enumerate(verified):
                for step in range(self.steps):
                    chosen = self._select(request.length + step + 1, chance)
                    selected[i * self.steps + step] = torch.tensor(chosen, dtype=torch.int32)
            locs = self.rows.swap_in(layer, asked, selected)
            if bool((locs[selected < 0] != -1).any()):
                self.found.append("nothing was asked for and a row was answered")
            for i, request in enumerate(verified):
                mine = slice(i * self.steps, (i + 1) * self.steps)
                if request not in self.requests:
                    if bool((locs[mine] != -1).any()):
                        self.found.append(f"{request.req.rid} is gone and reads rows")
                    continue
                wanted = selected[mine] >= 0
                positions, got = selected[mine][wanted].tolist(), locs[mine][wanted].long()
                right = content(torch.tensor([request.rows[p] for p in positions], dtype=torch.int64), layer)
                bad = (got <= 0) | (rows[got.clamp(min=0)] != right).any(1)
                self.answered += len(positions)
                if bool(bad.any()):
                    wrong = [p for p, is_bad in zip(positions, bad.tolist(), strict=True) if is_bad]
                    whose = f"{request.req.rid} of {request.length} tokens"
                    self.found.append(f"{whose}: layer {layer} reads wrong rows for {some(wrong)}")

    def _select(self, length: int, chance: random.Random) -> list[int]:
        """A query's top-k: mostly distinct, the newest among them, some repeated, some empty."""
        kinds = chance.choice(("distinct", "distinct", "repeated", "gaps"))
        pool = range(length)
        chosen = chance.sample(pool, min(TOP_K, length)) if kinds != "repeated" else chance.choices(pool, k=TOP_K)
        chosen[0] = length - 1 if length - 1 not in chosen else chosen[0]
        chosen += [-1] * (TOP_K - len(chosen))
        if kinds == "gaps":
            chosen = [-1 if chance.random() < 0.3 else position for position in chosen]
        return chosen

    # --- judging ---

    def _check_host(self, request: Request) -> None:
        """Every committed token is in the host pool, in the slot it has had from the start."""
        where = self.coordinator.req_to_host_pool[slot_of(request.req), : request.length]
        if bool((where < 0).any()):
            self.found.append(f"{request.req.rid}: tokens without a host slot")
            return
        now = dict(enumerate(where.tolist()))
        if any(now[position] != slot for position, slot in request.host.items()):
            self.found.append(f"{request.req.rid}: a token's host slot has changed")
        request.host = now
        self._check_count(request)
        numbers = torch.tensor([request.rows[p] for p in range(request.length)])
        for layer, rows in enumerate(self.pools.host_rows()):
            wrong = (rows[where] != content(numbers, layer)).any(1).nonzero().flatten().tolist()
            if wrong:
                self.found.append(f"{request.req.rid}: host rows of {some(wrong)} are wrong in layer {layer}")

    def _check_count(self, request: Request) -> None:
        """As many host slots are counted as the request has, staged or not."""
        has = int((self.coordinator.req_to_host_pool[slot_of(request.req)] >= 0).sum())
        if (counted := upstream.host_slots_held(self.coordinator, request.req)) != has:
            self.found.append(f"{request.req.rid} has {has} host slots, and {counted} are counted")

    def audit(self) -> None:
        """Every slot is in one hand. What is free is overwritten."""
        self.found += self.pools.audit(self.every)

    def end(self) -> None:
        """Finish everything; the pools are as they were."""
        for request in [*self.requests]:
            self.finish(request)
        self.audit()
        if self.pools.sizes() != self.pools.at_rest:
            self.found.append(f"free at the end {self.pools.sizes()}, at the start {self.pools.at_rest}")

    def corrupt_host_row(self, request: Request, position: int) -> None:
        where = self.coordinator.req_to_host_pool[slot_of(request.req), position]
        for rows in self.pools.host_rows():
            rows[where] += 1

    def findings(self) -> Iterator[str]:
        return iter(dict.fromkeys(self.found))

    def _submit(self, prompt: int) -> None:
        from lifecycle.world import World

        world = object.__new__(World)
        world.scheduler, world.requests = self.scheduler, self.every
        world.submit(f"r{len(self.every)}", prompt, OUTPUT)

    def _settle_lengths(self, request: Request) -> None:
        holder = request.req if hasattr(request.req, "kv_committed_len") else request.req.kv
        holder.kv_committed_len = request.length
