"""What can happen to a request, each as a short story with an end known beforehand.

A scenario gets a fresh world. It leaves findings behind, or an exception of SGLang's that would have ended the server.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable

from sglang.srt.managers.schedule_batch import ScheduleBatch

from .world import World

SCENARIOS: dict[str, Callable[[World], None]] = {}


def scenario(story: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS[story.__name__.replace("_", "-")] = story
    return story


# --- nothing special ---


@scenario
def plain(w: World) -> None:
    """Short and long prompts, one that outgrows its hot buffer, one that needs chunks, all to their ends."""
    w.submit("grows", prompt=110, output=24)
    w.submit("long", prompt=600, output=24)
    w.submit("short", prompt=3, output=5)
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)


@scenario
def more_than_slots(w: World) -> None:
    """More requests at once than there are slots."""
    for i in range(9):
        w.submit(f"r{i}", prompt=60, output=8)
    for _ in range(4):
        w.run(1)
        w.hold_staging()
    w.release_staging()
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)


@scenario
def corrupted_row(w: World) -> None:
    """The control: one host row is changed on purpose, and that must be found."""
    w.submit("grows", prompt=110, output=24)
    w.submit("long", prompt=600, output=40)
    w.run_until(lambda: decoded(w, 3, "grows", "long"))
    w.corrupt_host_row("long", token=300)
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)


# --- retraction ---


@scenario
def retract_decode(w: World) -> None:
    """Memory runs out in decode: one of two is retracted, the other goes on, and in the end both have answered."""
    w.submit("stays", prompt=110, output=24)
    w.submit("victim", prompt=120, output=20)
    w.run_until(lambda: decoded(w, 3, "stays", "victim"))
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: w.waiting("victim"), limit=20)
    w.expect(w.waiting("victim") == 1 and not w.waiting("stays"), "not exactly the victim is queued, once")
    w.expect(w.decoding("stays") and not w.decoding("victim"), "not exactly the survivor is decoding")
    w.run(3)
    w.pools.release_memory()
    w.run_until(lambda: w.ends("stays") and w.ends("victim"))
    finish(w)


@scenario
def last_request(w: World) -> None:
    """Memory runs out for the only request: it is aborted, once, and the scheduler goes on with the next."""
    w.submit("last", prompt=120, output=24)
    w.run_until(lambda: decoded(w, 3, "last"))
    w.pools.hold_memory("logical", keep=0)
    w.run_until(lambda: w.ends("last"), limit=20)
    w.run(3)
    w.expect(w.ends("last") == ["abort"], f"ended as {w.ends('last')}, not as aborted once")
    w.expect(not w.waiting("last") and not w.decoding("last"), "the aborted request is still there")
    w.pools.release_memory()
    w.expect_at_rest()
    w.submit("next", prompt=100, output=5)
    w.run_until(lambda: w.ends("next"))
    finish(w, "next")


@scenario
def preempt(w: World) -> None:
    """A request of higher priority takes the place of one that decodes."""
    w.prefer_priority()
    for i in range(4):
        w.submit(f"low{i}", prompt=100, output=12, priority=1)
    w.run_until(lambda: decoded(w, 3, *w.requests))
    w.submit("high", prompt=150, output=8, priority=99)
    w.run(1)
    w.expect(sum(w.waiting(f"low{i}") for i in range(4)) == 1, "not exactly one of the others was preempted, once")
    w.expect(not w.waiting("high"), "the request of higher priority waits")
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)


@scenario
def readmit(w: World) -> None:
    """Retracted and admitted again into the very same slot, then on past the hot buffer."""
    w.pools.hold_slots(keep=1)
    w.submit("again", prompt=110, output=30)
    w.run_until(lambda: decoded(w, 10, "again"))
    w.pause()
    w.expect(w.waiting("again") == 1, "the request is not queued once")
    w.backups.clear()
    w.resume()
    w.run_until(lambda: w.ends("again"))
    needed = 110 + 30 - 2  # the last token is never written, the one before it never needed again
    possible = needed + w.scheduler.enable_overlap  # one step more may be under way when the end is noticed
    w.expect(set(w.backups.values()) == {1}, "a row was backed up twice")
    w.expect(needed <= len(w.backups) <= possible, f"{len(w.backups)} rows were backed up, not {needed}")
    w.pools.release_slots()
    finish(w)


# --- pause with retract ---


@scenario
def pause_decoding(w: World) -> None:
    """Two that decode."""
    w.submit("a", prompt=110, output=24)
    w.submit("b", prompt=300, output=12)
    w.run_until(lambda: decoded(w, 5, "a", "b"))
    pause_and_resume(w, "a", "b")


@scenario
def pause_prefilled(w: World) -> None:
    """One whose prefill was the last batch: it is staging, or with overlap will be when its result is processed."""
    w.submit("a", prompt=110, output=24)
    w.run(1)
    w.hold_staging()
    pause_and_resume(w, "a")


@scenario
def pause_staged(w: World) -> None:
    """One that is staging and in no batch, beside one that decodes."""
    w.submit("decodes", prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("staged", prompt=200, output=12)
    w.run_until(lambda: w.staging("staged"))
    w.hold_staging()
    w.run(2)
    w.expect(w.staging("staged") and not w.decoding("staged"), "the request is not staging")
    pause_and_resume(w, "decodes", "staged")


@scenario
def pause_chunked(w: World) -> None:
    """One between two chunks of its prefill, beside one that decodes."""
    w.submit("decodes", prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("chunked", prompt=600, output=8)
    w.run_until(lambda: w.scheduler.chunked_req is not None)
    pause_and_resume(w, "decodes", "chunked")


# --- scheduling and idleness ---


@scenario
def one_token_each(w: World) -> None:
    """More requests of one token than slots: none of them ever decodes."""
    for i in range(9):
        w.submit(f"r{i}", prompt=20, output=1)
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests), limit=30)
    finish(w)


@scenario
def refused_while_staging(w: World) -> None:
    """A prompt that did not fit beside a long one in staging fits when that has only its hot buffer left."""
    w.submit("decodes", prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("long", prompt=640, output=24)
    w.run_until(lambda: w.staging("long"))
    w.hold_staging()
    w.submit("refused", prompt=300, output=8)
    w.run(3)
    w.expect(w.waiting("refused") == 1, "the prompt was to be refused")
    w.release_staging()
    w.run(4)
    w.expect(w.decoding("decodes") and w.decoding("long"), "the others were to be decoding")
    w.expect(not w.waiting("refused"), "there is room, and the prompt still waits")
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)


@scenario
def flush_while_staging(w: World) -> None:
    """Flushing the cache while a request is staging, and nothing else is going on, is refused and harms nobody."""
    w.submit("staged", prompt=110, output=24)
    w.run_until(lambda: w.staging("staged"))
    w.hold_staging()
    w.run(3)
    w.expect(not w.flush(), "the cache was flushed under a request that is staging")
    w.release_staging()
    w.run_until(lambda: w.ends("staged"))
    w.run(2)
    finish(w)
    w.expect(w.flush(), "the cache was not flushed although the scheduler is idle")
    w.expect_at_rest()


# --- at the border ---


@scenario
def finished_release(w: World) -> None:
    """A request that has ended, and another in its slot: releasing the first again leaves the other alone."""
    w.pools.hold_slots(keep=1)
    done = w.submit("done", prompt=100, output=5)
    w.run_until(lambda: w.ends("done"))
    w.submit("next", prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "next"))
    batch = ScheduleBatch(reqs=[done])
    for name in ("req_to_token_pool", "token_to_kv_pool_allocator", "tree_cache", "hisparse_coordinator"):
        setattr(batch, name, getattr(w.scheduler, name))
    wanted = inspect.signature(batch.release_req).parameters
    try:
        batch.release_req(0, 0, **({"server_args": w.scheduler.server_args} if "server_args" in wanted else {}))
    except Exception as error:  # that a request has no KV any more may be an error, but not the coordinator's
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        w.expect(not any("hisparse_coordinator" in file for file in files), f"the coordinator failed: {error!r}")
    w.run_until(lambda: w.ends("next"))
    w.pools.release_slots()
    finish(w)


# --- PD disaggregation, decode side ---


@scenario
def quick_finish(w: World) -> None:
    """A request that came with its KV and ends with its first token."""
    req = w.transferred("quick", prompt=200, output=1)
    w.disaggregated()
    w.coordinator.admit_request_direct(req)
    processor = getattr(w.scheduler, "batch_result_processor", w.scheduler)
    processor.process_batch_result_prebuilt(ScheduleBatch(reqs=[req]))
    w.expect_ended("quick")
    w.expect_at_rest()


@scenario
def direct_flag(w: World) -> None:
    """A request that was taken for staging is not, once it is admitted with its KV; its retraction leaves nothing."""
    req = w.transferred("direct", prompt=200, output=20)
    req.hisparse_staging = True
    w.coordinator.admit_request_direct(req)
    w.expect(not req.hisparse_staging, "the request is still taken for staging")
    w.coordinator.retract_req(req)
    w.drop(req)
    w.expect_at_rest()


@scenario
def checksum_mismatch(w: World) -> None:
    """A request that came with its KV is dropped for a wrong checksum."""
    drop = getattr(w.scheduler, "_handle_kv_checksum_mismatch", None)
    if drop is None:
        return w.inapplicable("this release has no KV checksums")
    req = w.transferred("corrupt", prompt=200, output=20)
    w.coordinator.admit_request_direct(req)
    drop(req, "checksums differ")
    w.expect(w.ends("corrupt") == ["abort"], f"ended as {w.ends('corrupt')}, not as aborted once")
    w.expect_at_rest()


@scenario
def chunked_abort(w: World) -> None:
    """With speculative workspace, a request is aborted between two chunks of its prefill."""
    if not w.give_speculative_workspace():
        return w.inapplicable("in this release a request has no speculative workspace before it decodes")
    w.submit("aborted", prompt=600, output=20)
    w.run_until(lambda: w.scheduler.chunked_req is not None)
    w.abort("aborted")
    w.run(2)
    w.expect(w.ends("aborted") == ["abort"], f"ended as {w.ends('aborted')}, not as aborted once")
    w.expect_at_rest()


# --- parts of stories ---


def decoded(w: World, tokens: int, *rids: str) -> bool:
    return all(w.decoding(rid) and len(w.requests[rid].output_ids) > tokens for rid in rids)


def finish(w: World, *rids: str) -> None:
    """Everything has ended as it should (`rids`: those only), and the scheduler is as at the start."""
    w.run(2)
    w.expect_ended(*(rids or w.requests))
    w.expect_at_rest()


def pause_and_resume(w: World, *rids: str) -> None:
    """After a pause with retract all are queued once and hold nothing; then they answer as if nothing had been."""
    w.pause()
    for rid in rids:
        w.expect(w.waiting(rid) == 1, f"{rid} is queued {w.waiting(rid)} times")
        w.expect(not w.decoding(rid) and not w.staging(rid), f"{rid} is still going on")
    w.expect_at_rest()
    if "ignore_waiting" in inspect.signature(w.scheduler.is_fully_idle).parameters:
        w.expect(w.flush(), "the cache cannot be flushed during the pause")
    w.resume()
    w.release_staging()
    w.run_until(lambda: all(w.ends(rid) for rid in rids))
    finish(w)
