"""A scheduler under observation: it runs its own event loop, and after every iteration its three pools are audited.

The only thing computed here is what a model would: for every token, its KV row in each layer. A row is a known function
of the token's id, and a request's tokens are consecutive ids, so that what every row must hold, and what every request
must answer, is known before anything runs. Free rows are overwritten with a pattern no token has.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from array import array
from collections import Counter
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams

from .server import PAGE, SLOTS, TOP_K, VOCABULARY

POISON = -1
UNITS = {"logical": "pages", "device": "pages", "host": "rows"}
SPAN = 1000
"""Ids from one request's first token to the next one's."""


class Stop(BaseException):
    """Ends the event loop between two iterations."""


class HeldEvent:
    """The end of a staging transfer that has not come yet."""

    def query(self):
        return False


class World:
    def __init__(self, scheduler):
        self.scheduler, self.coordinator = scheduler, scheduler.hisparse_coordinator
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.logical, self.device = self.allocator.logical_attn_allocator, self.allocator.hisparse_attn_allocator
        self.host, self.rows = self.coordinator.mem_pool_host, scheduler.req_to_token_pool
        self.mapping = self.coordinator.mem_pool_device.full_to_hisparse_device_index_mapping
        self.layers = range(self.coordinator.mem_pool_device.layer_num)
        self.requests: dict[str, Req] = {}
        self.replies: list[object] = []
        self.found: dict[str, int] = {}
        self.inbox: list[object] = []
        self.turn = self.turns_left = 0
        self.skipped = ""
        self.held_pages: dict[str, list[int]] = {"logical": [], "device": []}
        self.held_slots: list[int] = []
        self.backups: Counter[tuple[int, int]] = Counter()
        self._attach()
        self.at_rest = self.sizes()

    # --- driving ---

    def submit(self, rid: str, prompt: int, output: int, priority: int | None = None) -> Req:
        """Queue a request of `prompt` tokens that will answer with exactly `output` more."""
        first = 100 + SPAN * len(self.requests)
        ids = list(range(first, first + prompt))
        sampling = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        text = {"origin_input_text": "", "origin_input_ids": array("q", ids) if _wants_arrays() else ids}
        req = Req(rid=rid, sampling_params=sampling, vocab_size=VOCABULARY, priority=priority, **text)
        self.requests[rid] = req
        self.scheduler._add_request_to_queue(req)
        return req

    def run(self, turns: int) -> None:
        """Let the scheduler's event loop go round `turns` times."""
        self.turns_left = turns
        with contextlib.suppress(Stop):
            self.scheduler.event_loop_normal()

    def run_until(self, condition, limit: int = 200) -> None:
        """Go round until `condition()`; to be needed more than `limit` times is a finding."""
        for _ in range(limit):
            if condition():
                return
            self.run(1)
        self.expect(False, f"what was waited for did not come in {limit} iterations")

    def tell(self, message: object) -> None:
        """Have `message` arrive from the tokenizer, and go round once."""
        self.inbox.append(message)
        self.run(1)

    def pause(self) -> None:
        self.tell(_message("PauseGenerationReqInput", mode="retract"))

    def resume(self) -> None:
        self.tell(_message("ContinueGenerationReqInput"))

    def flush(self) -> bool:
        """Ask for the cache to be flushed; whether it was."""
        before = len(self.replies)
        self.tell(_message("FlushCacheReqInput"))
        answers = [r.success for r in self.replies[before:] if type(r).__name__ == "FlushCacheReqOutput"]
        assert len(answers) == 1, answers
        return answers[0]

    def hold_staging(self) -> None:
        """Keep every staging transfer that is under way from ending."""
        queue = self.coordinator.ack_staging_queue
        queue[:] = [act._replace(finish_event=HeldEvent()) for act in queue]

    def release_staging(self) -> None:
        done = self.coordinator.write_staging_stream.record_event()
        queue = self.coordinator.ack_staging_queue
        queue[:] = [act._replace(finish_event=done) for act in queue]

    def hold_memory(self, pool: str, keep: int) -> None:
        """Take free pages of `pool` ("logical" or "device") away until `keep` are left."""
        allocator = getattr(self, pool)
        take = allocator.available_size() // PAGE - keep
        self.held_pages[pool] += (allocator.alloc(take * PAGE)[::PAGE] // PAGE).tolist()
        self.scheduler.max_total_num_tokens = min(  # what an idle scheduler is to find free
            self.at_rest[name] - len(pages) * PAGE for name, pages in self.held_pages.items()
        )

    def release_memory(self) -> None:
        for pool, pages in self.held_pages.items():
            if pages:
                slots = torch.tensor(pages).repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(len(pages))
                getattr(self, pool).free(slots)
                pages.clear()
        self.scheduler.max_total_num_tokens = min(self.at_rest[name] for name in self.held_pages)

    def hold_slots(self, keep: int) -> None:
        """Leave only `keep` request slots."""
        self.held_slots = [self.rows.free_slots.pop() for _ in range(len(self.rows.free_slots) - keep)]

    def release_slots(self) -> None:
        self.rows.free_slots += self.held_slots
        self.held_slots = []

    def prefer_priority(self) -> None:
        """As with --enable-priority-scheduling."""
        self.scheduler.enable_priority_scheduling = self.scheduler.enable_priority_preemption = True
        self.scheduler.policy.enable_priority_scheduling = True

    def abort(self, rid: str) -> None:
        self.tell(_message("AbortReq", rid=rid))

    # --- PD disaggregation ---

    def disaggregated(self) -> None:
        """As on a decode worker, as far as the result of a batch goes."""
        mode = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode.DECODE
        object.__setattr__(
            getattr(self.scheduler, "batch_result_processor", self.scheduler), "disaggregation_mode", mode
        )
        for name in ("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue"):
            setattr(self.scheduler, name, SimpleNamespace(queue=[], retracted_queue=[]))

    def transferred(self, rid: str, prompt: int, output: int) -> Req:
        """A request with slots as a decode worker allocates them, its KV in the host pool, and its first token."""
        req = self.submit(rid, prompt, output)
        self.scheduler.waiting_queue.remove(req)
        decode = importlib.import_module("sglang.srt.disaggregation.decode")
        queue = object.__new__(decode.DecodePreallocQueue)
        queue.scheduler, queue.tree_cache = self.scheduler, self.scheduler.tree_cache
        queue.req_to_token_pool, queue.token_to_kv_pool_allocator = self.rows, self.allocator
        queue.token_to_kv_pool = self.allocator.get_kvcache()
        queue._pre_alloc(req)
        tokens = torch.tensor(list(req.origin_input_ids))
        where = self.coordinator.req_to_host_pool[_slot(req), :prompt]
        for layer, rows in enumerate(self._host_rows()):
            rows[where] = content(tokens, layer)
        req.output_ids.append(int(tokens[-1]) + 1)
        return req

    def drop(self, req: Req) -> None:
        """Give up what the scheduler, not the coordinator, holds of a request."""
        release = importlib.import_module("sglang.srt.mem_cache.common").release_kv_cache
        flag = {"checkpoint", "is_insert"} & set(inspect.signature(release).parameters)
        release(req, self.scheduler.tree_cache, **dict.fromkeys(flag, False))

    def give_speculative_workspace(self, capacity: int = PAGE) -> bool:
        """Let every request hold `capacity` device slots from its first chunk on, as with speculative decoding."""
        swap = getattr(self.coordinator, "spec_swap", None)
        if swap is None:
            return False
        swap.enabled, swap.scratch_capacity = True, capacity
        swap.req_to_scratch = torch.zeros((len(self.layers), SLOTS + 1, capacity), dtype=torch.int32)
        return True

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
        found = []
        for reply in self.replies:
            if type(reply).__name__ == "AbortReq" and reply.rid == rid:
                found.append("abort")
            elif hasattr(reply, "finished_reasons"):
                reasons = zip(reply.rids, reply.finished_reasons, strict=True)
                found += [reason["type"] for name, reason in reasons if name == rid and reason]
        return found

    def answered(self, rid: str) -> bool:
        """Whether the answer is exactly what the request asked for."""
        req = self.requests[rid]
        first = req.origin_input_ids[0] + len(req.origin_input_ids)
        return list(req.output_ids) == list(range(first, first + req.sampling_params.max_new_tokens))

    def corrupt_host_row(self, rid: str, token: int) -> None:
        """Change one KV row of a request behind everybody's back."""
        self._host_rows()[0][self.coordinator.req_to_host_pool[_slot(self.requests[rid]), token]] += 1

    def sizes(self) -> dict[str, int]:
        return {
            "logical": self.logical.available_size(),
            "device": self.device.available_size(),
            "host": self.host.available_size(),
            "slots": self.rows.available_size(),
        }

    def expect(self, condition: bool, what: str) -> None:
        if not condition:
            self.found.setdefault(what, self.turn)

    @property
    def findings(self) -> list[str]:
        """What was not as expected, each once."""
        return [f"{what} (first in iteration {turn})" for what, turn in self.found.items()]

    def inapplicable(self, why: str) -> None:
        """There is no such thing in this release."""
        self.skipped = why

    def expect_ended(self, *rids: str) -> None:
        """Each request has ended once, with the answer known beforehand."""
        for rid in rids:
            self.expect(self.ends(rid) == ["length"], f"{rid} ended as {self.ends(rid)}, not once by its length")
            self.expect(self.answered(rid), f"{rid} answered {list(self.requests[rid].output_ids)}")

    def expect_at_rest(self) -> None:
        """The pools are as they were, and nothing is remembered of anybody."""
        self.expect(self.sizes() == self.at_rest, f"pools hold {self.sizes()}, at the start {self.at_rest}")
        self.expect(not self.coordinator.ack_staging_queue, "the staging queue is not empty")
        self.audit()

    # --- auditing ---

    def audit(self) -> None:
        """No slot is in two hands or in none, free slots remember nobody, and every live row is what was written."""
        holders = {rid: slot for rid, req in self.requests.items() if (slot := _slot(req)) is not None}
        owned: dict[str, Counter[int]] = {pool: Counter(pages) for pool, pages in self.held_pages.items()}
        owned["host"] = Counter()
        for rid, slot in holders.items():
            logical = self.rows.req_to_token[slot, : _allocated(self.requests[rid])].long()
            capacity = int(self.coordinator.req_device_buffer_size[slot])
            device = self.coordinator.req_to_device_buffer[slot, :capacity] if capacity else self.mapping[logical]
            host = self.coordinator.req_to_host_pool[slot]
            workspace = self.coordinator.spec_swap.req_to_scratch[0, slot] if self._has_workspace(slot) else device[:0]
            owned["logical"].update(set((logical // PAGE).tolist()))
            owned["device"].update(set((device[device > 0] // PAGE).tolist()))
            owned["device"].update(set((workspace // PAGE).tolist()))
            owned["host"].update(host[host >= 0].tolist())
        free = {
            "logical": Counter(_pages(self.logical)),
            "device": Counter(_pages(self.device)),
            "host": Counter(_host_free(self.host).tolist()),
        }
        everything = {
            "logical": set(range(1, self.logical.size // PAGE + 1)),
            "device": set(range(1, self.device.size // PAGE + 1)),
            "host": set(range(self.host.size)),
        }
        for pool, pages in everything.items():
            count = owned[pool] + free[pool]
            twice, never = [p for p in pages if count[p] > 1], [p for p in pages if not count[p]]
            self.expect(not twice, f"{pool} {UNITS[pool]} in two hands: {_list(twice)}")
            self.expect(not never, f"{pool} {UNITS[pool]} in no hand: {_list(never)}")
        slots = Counter([*holders.values(), *self.rows.free_slots, *self.held_slots])
        self.expect(len(slots) == SLOTS and set(slots.values()) == {1}, f"request slots: {dict(slots)}")
        self._forgotten(self.rows.free_slots)
        self._poison(free)

    def _has_workspace(self, slot: int) -> bool:
        swap = getattr(self.coordinator, "spec_swap", None)
        return swap is not None and slot in swap._scratch_reqs

    def _forgotten(self, free: list[int]) -> None:
        c = self.coordinator
        remembered = {
            "hot buffer size": int(c.req_device_buffer_size[free].abs().sum()) if free else 0,
            "hot buffer": int((c.req_to_device_buffer[free] != 0).sum()),
            "cached tokens": int((c.req_device_buffer_tokens[:, free] != -1).sum()),
            "cached slots": int((c.req_device_buffer_token_locs[:, free] != -1).sum()),
            "host slots": int((c.req_to_host_pool[free] != -1).sum()),
            "LRU order": int((c.lru_slots[:, free] != c._lru_init).sum()),
            "skipped backup": sum(c._skip_first_backup[slot] for slot in free),
        }
        for what, count in remembered.items():
            self.expect(count == 0, f"free request slots still have a {what}")

    def _poison(self, free: dict[str, Counter[int]]) -> None:
        for size, pages, buffers in (
            (PAGE, free["device"], self._device_rows()),
            (1, free["host"], self._host_rows()),
        ):
            rows = torch.tensor(sorted(pages), dtype=torch.int64)[:, None] * size + torch.arange(size)
            for layer in buffers:
                layer[rows.flatten()] = POISON

    def _check_host(self, rid: str, slot: int, upto: int) -> None:
        first = self.requests[rid].origin_input_ids[0]
        where = self.coordinator.req_to_host_pool[slot, :upto]
        if bool((where < 0).any()):
            self.expect(False, f"{rid}: tokens {_list((where < 0).nonzero().flatten().tolist())} have no host row")
            return
        tokens = torch.arange(first, first + upto)
        for layer, rows in enumerate(self._host_rows()):
            wrong = (rows[where] != content(tokens, layer)).any(1)
            self.expect(
                not bool(wrong.any()),
                f"{rid}: host rows of tokens {_list(wrong.nonzero().flatten().tolist())} are wrong",
            )

    # --- standing in ---

    def _attach(self) -> None:
        self.scheduler.model_worker.forward_batch_generation = self._forward
        sender = _first(
            "sglang.srt.managers.scheduler_components.output_sender", "sglang.srt.managers.scheduler"
        ).SenderWrapper
        sender.send_output = lambda _sender, output, recv_obj=None: self.replies.append(output)
        owner = getattr(self.scheduler, "request_receiver", self.scheduler)
        type(owner).recv_requests = lambda _owner, *_, **__: self._receive()
        backup = self.host.backup_from_device_all_layer

        def counted(pool, host_indices, *args, **kwargs):
            self.backups.update(host_indices.tolist())
            return backup(pool, host_indices, *args, **kwargs)

        self.host.backup_from_device_all_layer = counted

    def _receive(self) -> list[object]:
        if self.turn:
            self.audit()
        if self.turns_left == 0:
            raise Stop
        self.turns_left -= 1
        self.turn += 1
        inbox, self.inbox = self.inbox, []
        return inbox

    def _forward(self, batch, **_):
        """Write the KV rows of the batch's tokens; in decode, also read as attention would, through the hot buffer."""
        ids, slots, lengths = batch.input_ids.tolist(), batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        self.coordinator.num_real_reqs.fill_(len(slots))
        if hasattr(self.coordinator, "wait_for_pending_backup"):
            self.coordinator.wait_for_pending_backup()
        if batch.forward_mode.is_decode():
            counts = [1] * len(slots)
        else:
            counts = [n.item() if isinstance(n, torch.Tensor) else n for n in _extend_lens(batch)]
        tokens, slots_of = torch.tensor(ids), [slot for slot, n in zip(slots, counts, strict=True) for _ in range(n)]
        positions = [p for length, n in zip(lengths, counts, strict=True) for p in range(length - n, length)]
        device = self.mapping[self.rows.req_to_token[slots_of, positions].long()]
        self.expect(bool((device > 0).all()), "a token has no device slot to be written to")
        for layer, rows in enumerate(self._device_rows()):
            rows[device] = content(tokens, layer)
        ends = torch.tensor(counts).cumsum(0) - 1
        if batch.forward_mode.is_decode():
            self._attend(batch, slots, lengths, ids)
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=tokens[ends] + 1,
            can_run_cuda_graph=False,
        )

    def _attend(self, batch, slots, lengths, ids) -> None:
        wanted = torch.full((len(slots), TOP_K), -1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            picked = {length - 1, *((self.turn * 37 + i * 29) % length for i in range(TOP_K - 1))}
            wanted[row, : len(picked)] = torch.tensor(sorted(picked), dtype=torch.int32)
        names = {_slot(req): rid for rid, req in self.requests.items()}
        for layer, rows in enumerate(self._device_rows()):
            found = self.coordinator.swap_in_selected_pages(batch.req_pool_indices, batch.seq_lens, wanted, layer)
            for row, length in enumerate(lengths):
                asked, got = wanted[row][wanted[row] >= 0].long(), found[row][wanted[row] >= 0].long()
                tokens = asked + (ids[row] - length + 1)
                wrong = (got <= 0) | (rows[got.clamp(min=0)] != content(tokens, layer)).any(1)
                self.expect(
                    not bool(wrong.any()),
                    f"{names.get(slots[row])}: attention read wrong rows for tokens {_list(asked[wrong].tolist())}",
                )
        for row, length in enumerate(lengths):
            if slots[row] in names:
                self._check_host(names[slots[row]], slots[row], length - 1)

    def _device_rows(self):
        pool = self.coordinator.mem_pool_device
        return [pool.kv_buffer[layer].view(torch.int16).flatten(1) for layer in self.layers]

    def _host_rows(self):
        return [self.host.kv_buffer[layer].view(torch.int16).flatten(1) for layer in self.layers]


def content(tokens, layer: int):
    """(n, row) int16: what the KV row of each token holds in `layer`."""
    return ((tokens[:, None] * 31 + layer * 7 + torch.arange(576) * 3) % 32749).to(torch.int16)


def _slot(req) -> int | None:
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def _allocated(req) -> int:
    return (req if hasattr(req, "kv_allocated_len") else req.kv).kv_allocated_len


def _extend_lens(batch):
    return getattr(batch, "extend_seq_lens", None) or batch.extend_lens


def _pages(allocator) -> list[int]:
    staged = getattr(allocator, "staged_pages", None) or [p for p in [allocator.release_pages] if p is not None]
    return torch.cat([allocator.free_pages, *staged]).tolist()


def _host_free(pool):
    return torch.cat([pool.free_slots, *getattr(pool, "release_slots", [])])


def _wants_arrays() -> bool:
    return "array" in str(Req.__init__.__annotations__.get("origin_input_ids", ""))


def _message(name: str, **fields):
    return getattr(importlib.import_module("sglang.srt.managers.io_struct"), name)(**fields)


def _first(*modules: str):
    for name in modules:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(" or ".join(modules))


def _list(items) -> str:
    items = sorted(items)
    return f"{items[:6]}{' and more' if len(items) > 6 else ''}"
