"""What two pipeline stages go through: each has layers, pools and a scheduler of its own, and must decide as the other.

In both SGLang's own event loop takes turns with two microbatches, and sends requests, hidden states and tokens by gloo.
"""

from __future__ import annotations

from collections.abc import Callable


class SlowTransfer:
    """The end of a staging transfer that has not come when it is asked after, unless somebody waits for it."""

    def __init__(self, times: int) -> None:
        self.times = times

    def query(self) -> bool:
        self.times -= 1
        return self.times < 0

    def synchronize(self) -> None:
        self.times = 0


def world(scheduler, stage: int):
    """A world in which what the tokenizer sends comes to the first stage, and the last one knows the next token."""
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    from .world import World

    receiver = getattr(scheduler, "request_receiver", scheduler)
    from_the_stage_before = type(receiver).recv_requests

    class Stage(World):
        def __init__(self, scheduler) -> None:
            super().__init__(scheduler)
            self.decoded_in: dict[str, list[int]] = {}

        def again(self) -> None:
            super().again()
            self.decoded_in.clear()

        def decoding(self, rid: str) -> bool:
            return any(self.requests[rid] in batch.reqs for batch in self.scheduler.running_mbs)

        def _receive(self):
            arrived = super()._receive()
            return from_the_stage_before(receiver) if stage else arrived

        def _forward(self, batch, **_):
            if batch.forward_mode.is_decode():
                for req in batch.reqs:
                    self.decoded_in.setdefault(req.rid, []).append(self.turn)
            result = super()._forward(batch)
            if stage:
                return result
            hidden = {"hidden_states": result.next_token_ids[:, None].float()}
            return GenerationBatchResult(
                pp_hidden_states_proxy_tensors=PPProxyTensors(hidden), logits_output=None, can_run_cuda_graph=False
            )

    return Stage(scheduler)


def slow_on_one(w, stage: int) -> dict[str, object]:
    """A transfer takes longer on one stage, then one on the other; both are busy with another request."""
    w.arrive("other", prompt=110, output=40)
    w.run(8)
    for late, rid in enumerate(("first", "second")):
        w.arrive(rid, prompt=200, output=12)
        w.run(1)
        w.run_until(lambda rid=rid: w.staging(rid), limit=6)
        queue = w.coordinator.ack_staging_queue
        queue[:] = [act._replace(finish_event=SlowTransfer(5 * (stage == late))) for act in queue]
        w.run(8)
    return _tell(w, "other", "first", "second")


def busy_elsewhere(w, stage: int) -> dict[str, object]:
    """What finds no room waits while another microbatch is busy, and is refused once nobody is there."""
    w.arrive("busy", prompt=110, output=40)
    w.run(9)
    w.expect(w.decoding("busy"), "nobody is busy")
    w.pools.hold_memory("device", keep=6)
    w.arrive("large", prompt=500, output=8)
    w.run(7)
    w.arrive("other", prompt=510, output=8)
    w.run(8)
    w.expect(w.decoding("busy"), "the one that was busy is so no more")
    w.expect(w.waiting("large") == w.waiting("other") == 1, f"large ended as {w.ends('large')} while another decodes")
    w.pools.release_memory()
    told = _tell(w, "busy", "large", "other")
    w.pools.hold_memory("device", keep=4)
    w.arrive("never", prompt=600, output=8)
    w.run(12)
    w.expect(w.ends("never") == ["abort"], f"never ended as {w.ends('never')}, not once as refused")
    w.pools.release_memory()
    w.run(2)
    w.expect_at_rest()
    return told | {"findings": w.findings}


def full_in_both(w, stage: int) -> dict[str, object]:
    """One request decodes in each microbatch when the host pool is full: one goes back to the queue, nobody ends."""
    w.arrive("one", prompt=110, output=40)
    w.run(9)
    w.arrive("two", prompt=120, output=40)
    w.run(8)
    apart = [[req.rid for req in batch.reqs] for batch in w.scheduler.running_mbs]
    w.expect(sorted(apart) == [["one"], ["two"]], f"microbatches decode {apart}")
    w.pools.hold_memory("host", keep=0)
    w.run_until(lambda: w.waiting("one") or w.waiting("two") or w.ends("one") or w.ends("two"), limit=200)
    w.expect(w.waiting("one") + w.waiting("two") == 1, f"they ended as {w.ends('one')} and {w.ends('two')}")
    w.pools.release_memory()
    return _tell(w, "one", "two")


def aborted(w, stage: int) -> dict[str, object]:
    """Aborts of requests that wait, prefill in chunks, and decode, each with another in the other microbatch."""
    w.arrive("stays", prompt=110, output=60)
    w.run(9)
    for rid, prompt, turns in (("prefills", 1000, 2), ("stages", 200, 3), ("decodes", 120, 9)):
        w.arrive(rid, prompt, output=30)
        w.run(turns)
        _abort(w, stage, rid)
        w.run(8)
        w.expect(not w.waiting(rid) and not w.decoding(rid), f"{rid} goes on")
    return _tell(w, "stays")


def _abort(w, stage: int, rid: str) -> None:
    """From the tokenizer: to the first stage."""
    if stage:
        w.run(1)
    else:
        w.abort(rid)


def _tell(w, *rids: str) -> dict[str, object]:
    """Run on to the end. In which iterations each request decoded, and what else was found."""
    w.run(200)
    w.expect_ended(*rids)
    w.expect_at_rest()
    return {"decoded": {rid: w.decoded_in.get(rid) for rid in rids}, "findings": w.findings}


def everything(w, stage: int) -> dict[str, object]:
    """One after the other."""
    decoded, findings = {}, []
    for play in (slow_on_one, busy_elsewhere, full_in_both, aborted):
        told = play(w, stage)
        decoded[play.__name__] = told["decoded"]
        findings += [f"{play.__name__}: {what}" for what in told["findings"]]
        w.again()
    return {"decoded": decoded, "findings": findings}


STORIES: dict[str, Callable] = {"slow-on-one": slow_on_one, "stages": everything}
