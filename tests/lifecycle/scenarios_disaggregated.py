"""The decode side of PD disaggregation, beyond the result of a batch."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import SimpleNamespace

from .pools import slot_of
from .scenarios import decoded, finish, scenario
from .world import World


@scenario
def abort_waiting_transferred(w: World) -> None:
    """A request that came with its KV waits to decode when its client gives up; one more waits and stays."""
    gone, stays = w.transferred("gone", prompt=200, output=12), w.transferred("stays", prompt=300, output=12)
    _as_decode_worker(w)
    for req in (gone, stays):
        w.coordinator.admit_request_direct(req)
        w.scheduler.waiting_queue.append(req)
    message = importlib.import_module("sglang.srt.managers.io_struct").AbortReq
    w.scheduler.abort_request(message(rid="gone"))
    w.expect(w.ends("gone") == ["abort"], f"ended as {w.ends('gone')}, not as aborted once")
    w.expect([req.rid for req in w.scheduler.waiting_queue] == ["stays"], "not exactly the other waits")
    w.expect(not list(w.pools.check_host(stays, 300)), "the other's host rows are wrong")
    w.scheduler.abort_request(message(abort_all=True))
    w.expect(w.ends("stays") == ["abort"], f"ended as {w.ends('stays')}, not as aborted once")
    w.expect_at_rest()


@scenario
def retract_transferred(w: World) -> None:
    """Memory runs out on a decode worker: one of two is given up or handed to a prefill worker, the other goes on."""
    w.submit("stays", prompt=110, output=24)
    victim = w.submit("victim", prompt=120, output=20)
    w.run_until(lambda: decoded(w, 3, "stays", "victim"))
    _as_decode_worker(w)
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: not w.decoding("victim"), limit=20)
    _check_given_up(w, victim)
    w.expect(w.decoding("stays"), "not exactly the survivor is decoding")
    w.pools.release_memory()
    w.run_until(lambda: w.ends("stays"))
    w.run(2)
    w.expect_ended("stays")
    w.expect_at_rest()


@scenario
def retract_waiting_transferred(w: World) -> None:
    """Memory runs out on a decode worker: who came with its KV and waits for its turn goes before who decodes."""
    w.pools.hold_slots(keep=2)
    w.submit("decodes", prompt=110, output=40)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    waits = w.transferred("waits", prompt=200, output=12)
    _as_decode_worker(w)
    w.coordinator.admit_request_direct(waits)
    w.scheduler.waiting_queue.append(waits)
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: not w.decoding("decodes") or not w.waiting("waits"), limit=20)
    w.expect(w.decoding("decodes"), "the one that decodes does not go on")
    _check_given_up(w, waits)
    w.pools.release_memory()
    w.run_until(lambda: w.ends("decodes"))
    w.pools.release_slots()
    finish(w, "decodes")


@scenario
def last_beside_transfer(w: World) -> None:
    """Memory runs out for the only one that decodes, as KV on its way has it: another time there may be room."""
    last = w.submit("last", prompt=110, output=40)
    w.run_until(lambda: decoded(w, 3, "last"))
    _as_decode_worker(w)
    last.lora_id = "an adapter"  # which no release can have its KV computed again with
    w.scheduler.disagg_decode_transfer_queue.queue.append(SimpleNamespace(seqlen=200))
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: w.ends("last"), limit=20)
    _check_given_up(w, last)
    w.scheduler.disagg_decode_transfer_queue.queue.clear()
    w.pools.release_memory()
    w.run(2)
    w.expect_at_rest()


@scenario
def pause_transferred(w: World) -> None:
    """A pause that retracts on a decode worker: all are given up or handed to a prefill worker."""
    w.submit("a", prompt=110, output=24)
    w.submit("b", prompt=300, output=12)
    w.run_until(lambda: decoded(w, 5, "a", "b"))
    _as_decode_worker(w)
    pause = importlib.import_module("sglang.srt.managers.io_struct").PauseGenerationReqInput
    w.scheduler.pause_generation(pause(mode="retract"))
    for req in w.requests.values():
        _check_given_up(w, req)
    w.expect_at_rest()


@scenario
def abort_during_pause(w: World) -> None:
    """A pause takes two requests of a decode worker back; before it ends, the client of one gives up."""
    for rid in ("gone", "stays"):
        w.submit(rid, prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "gone", "stays"))
    _as_decode_worker(w)
    queue = w.scheduler.disagg_decode_prealloc_queue
    if not hasattr(queue, "hold_rebootstrap"):
        return w.inapplicable("a pause has no KV computed again")
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    w.scheduler.pause_generation(messages.PauseGenerationReqInput(mode="retract"))
    w.scheduler.abort_request(messages.AbortReq(rid="gone"))
    w.expect(w.ends("gone") == ["abort"], f"ended as {w.ends('gone')}, not as aborted once")
    w.expect([req.rid for req in queue.held_rebootstrap_reqs] == ["stays"], "not exactly the other is held")
    w.expect_at_rest()
    return None


@scenario
def adapter_during_pause(w: World) -> None:
    """A pause takes three requests of a decode worker back, of which one has an adapter and one images."""
    images = importlib.import_module("sglang.srt.managers.schedule_batch").MultimodalInputs(mm_items=[])
    more = {"adapter": {"lora_id": "an adapter"}, "images": {"multimodal_inputs": images}, "text": {}}
    for rid in more:
        w.submit(rid, prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, *more))
    _as_decode_worker(w)
    queue = w.scheduler.disagg_decode_prealloc_queue
    if not hasattr(queue, "hold_rebootstrap"):
        return w.inapplicable("a pause has no KV computed again")
    for rid, fields in more.items():
        vars(w.requests[rid]).update(fields)
    pause = importlib.import_module("sglang.srt.managers.io_struct").PauseGenerationReqInput
    w.scheduler.pause_generation(pause(mode="retract"))
    held = [req.rid for req in queue.held_rebootstrap_reqs]
    w.expect(held == ["text"], f"KV of {held} is computed again from its tokens alone")
    for rid in ("adapter", "images"):
        _check_told_to_retry(w, rid)
    w.expect_at_rest()
    return None


def _check_given_up(w: World, req) -> None:
    """The request holds nothing, and either was answered once, with 503, or is on its way to a prefill worker."""
    w.expect(slot_of(req) is None, f"{req.rid} still has a slot")
    if getattr(req, "pd_rebootstrap_in_progress", False):
        w.expect(not w.ends(req.rid), "the request that is computed again was answered")
        return
    _check_told_to_retry(w, req.rid)


def _check_told_to_retry(w: World, rid: str) -> None:
    codes = [reason.get("status_code") for reason in w.reasons(rid)]
    w.expect(codes == [503], f"{rid} was answered {codes}, not 503 once")


def _as_decode_worker(w: World) -> None:
    """A scheduler that believes to be one; what arrives in its queues does not go on from there."""
    w.disaggregated()
    decode = importlib.import_module("sglang.srt.disaggregation.decode")
    modes = importlib.import_module("sglang.srt.disaggregation.utils").DisaggregationMode
    w.scheduler.disaggregation_mode = modes.DECODE
    batch = sys.modules["sglang.srt.managers.schedule_batch"]
    if "server_args" in inspect.signature(batch.ScheduleBatch.release_req).parameters:  # to 0.5.18
        object.__setattr__(w.scheduler.server_args, "disaggregation_mode", "decode")
    else:
        settings = Settings(batch.get_disagg(), disaggregation_mode="decode")
        batch.get_disagg = lambda: settings
    w.scheduler.req_to_token_pool.pre_alloc_size = 0
    queue = object.__new__(decode.DecodePreallocQueue)
    queue.token_to_kv_pool_allocator = w.scheduler.token_to_kv_pool_allocator
    queue.scheduler, queue.queue, queue.retracted_queue = w.scheduler, [], []
    queue._check_if_req_exceed_kv_capacity = lambda _req: True
    queue.held_rebootstrap_reqs = []
    queue.transfer_queue = w.scheduler.disagg_decode_transfer_queue
    w.scheduler.disagg_decode_prealloc_queue = queue
    w.scheduler.disagg_decode_transfer_queue.has_pending_deferred_releases = lambda: False


class Settings:
    """SGLang's settings, which cannot be written to, with some of them changed."""

    def __init__(self, settings, **changed) -> None:
        self.settings = settings
        vars(self).update(changed)

    def __getattr__(self, name: str):
        return getattr(self.settings, name)
