"""A pool runs out while SGLang speculates by itself, as it can from 0.5.22 on.

A request then has its whole hot buffer and scratch besides; a step has logical and host slots for the drafts of two.
What a draft model and a verification would compute is left out: requests decode as usual, and SGLang's scheduler is
asked for one step more of a batch that speculates.
"""

from __future__ import annotations

import importlib

import torch

from .pools import PAGE
from .scenarios import decoded, finish, scenario
from .scenarios_memory import late_without_buffer
from .world import World

DRAFTS = 3


@scenario
def drafts_device_full(w: World) -> None:
    """The device pool has no room for a whole buffer when a transfer has ended: the request goes back to the queue."""
    if _speculative(w):
        late_without_buffer(w, prompt=40, keep=1)


@scenario
def drafts_host_full(w: World) -> None:
    """The host pool has no room for the drafts of two: the younger is retracted before anything is taken."""
    if not _speculative(w):
        return
    _two_decode(w)
    w.pools.hold_memory("host", keep=1)
    _step(w)
    w.expect(w.waiting("victim") == 1 and w.decoding("stays"), "not exactly the younger was retracted")
    _finish_plainly(w)


@scenario
def drafts_take_no_device(w: World) -> None:
    """The device pool is full, and so are the buffers: a step of drafts needs nothing of it, nobody is retracted."""
    if not _speculative(w):
        return
    _two_decode(w)
    w.pools.hold_memory("device", keep=0)
    _step(w)
    w.expect(not w.waiting("stays") and not w.waiting("victim"), "a request was retracted though it needed nothing")
    _finish_plainly(w)


# --- parts of stories ---


def _speculative(w: World) -> bool:
    """As if the server had been started with drafts; every table is SGLang's own, but for the size of the scratch."""
    if not w.give_speculative_workspace():
        w.inapplicable("in this release SGLang does not speculate by itself")
        return False
    coordinator, top_k = w.coordinator, w.coordinator.top_k
    coordinator.top_k = 1024  # the least that SGLang takes
    swap = coordinator.spec_swap = type(coordinator.spec_swap)(coordinator, num_draft_tokens=DRAFTS)
    coordinator.top_k, swap.scratch_capacity = top_k, PAGE
    swap.req_to_scratch = torch.zeros((*swap.req_to_scratch.shape[:2], PAGE), dtype=torch.int32)
    allocator = coordinator.token_to_kv_pool_allocator
    allocator.configure_spec_scratch(PAGE, device_buffer_size=coordinator.padded_buffer_size)
    drafts = {"speculative_num_draft_tokens": DRAFTS, "max_speculative_num_draft_tokens": DRAFTS}
    algorithm = {"speculative_algorithm": "EAGLE", "speculative_num_steps": DRAFTS - 1, "speculative_eagle_topk": 1}
    w.scheduler.drafts = (
        importlib.import_module("sglang.srt.runtime_context").get_spec().override(**drafts, **algorithm)
    )
    w.scheduler.drafts.__enter__()
    return True


def _two_decode(w: World) -> None:
    """Of 190 tokens each, so that the drafts of two steps go past a page."""
    for rid in ("stays", "victim"):
        w.submit(rid, prompt=185, output=60)
    w.run_until(lambda: all(decoded(w, 3, rid) for rid in w.requests))


def _step(w: World) -> None:
    """The scheduler gets its batch ready for a step that speculates, the coordinator for the verification."""
    kinds = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    batch, plain = w.scheduler.running_batch, w.scheduler.running_batch.spec_algorithm
    batch.spec_algorithm = kinds.EAGLE
    batch = w.scheduler.running_batch = w.scheduler.update_running_batch(batch)
    for req in batch.reqs:
        first = len(req.origin_input_ids) + len(req.output_ids) - 1
        w.expect(req.kv.kv_allocated_len >= first + DRAFTS, f"{req.rid} has no logical slots for its drafts")
    slots = batch.req_pool_indices.tolist()
    drafts = [
        w.scheduler.req_to_token_pool.req_to_token[s, n : n + DRAFTS]
        for s, n in zip(slots, batch.seq_lens, strict=True)
    ]
    batch.out_cache_loc = torch.cat(drafts).long()
    w.coordinator.prepare_spec_verify(batch)
    batch.spec_algorithm = plain


def _finish_plainly(w: World) -> None:
    """Give back what was taken ahead, by a pause that retracts; then all decode as usual to their ends."""
    w.pools.release_memory()
    w.pause()
    w.expect_at_rest()
    w.resume()
    w.run_until(lambda: w.ends("stays") and w.ends("victim"))
    finish(w)
