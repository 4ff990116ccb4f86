"""KV of a PD decode worker that is computed again: what the stream leaves out, by what a prefill worker is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin.overlays import pd_retract, rebootstrap_room, replayed_token


def request(tokens: list[int], held: int | None = None, finished: bool = False) -> Any:
    return SimpleNamespace(
        output_ids=list(tokens), pd_rebootstrap_forced_output_id=held, finished=lambda: finished, send_token_offset=0
    )


def streamed(*reqs: Any, hisparse: bool = True) -> list[list[int]]:
    """Every token of whoever SGLang is left to stream."""
    streamer = SimpleNamespace(server_args=SimpleNamespace(enable_hisparse=hisparse))
    seen: list[list[int]] = []
    replayed_token.stream_output(
        lambda _streamer, reqs, _logprob, _skip: seen.extend(r.output_ids for r in reqs), streamer, list(reqs), False
    )
    return seen


def test_who_has_a_token_held_back_is_not_streamed() -> None:
    held = request([1], held=2)
    assert streamed(request([5, 6]), held) == [[5, 6]]
    assert (held.output_ids, held.pd_rebootstrap_forced_output_id) == ([1], 2)


def test_who_ends_meanwhile_gets_the_token_back_once() -> None:
    ended = request([1], held=2, finished=True)
    assert streamed(ended) == [[1, 2]] == streamed(ended)


def test_without_hisparse_nothing_is_left_out() -> None:
    assert streamed(request([1], held=2), hisparse=False) == [[1]]


def asked_again(
    times: int = 1, *, hisparse: bool = True, again: bool = True, rank: int | None = 0, fake: bool = False
) -> Any:
    """A request after its KV was asked for so often, where the prefill server's rank is known, or not."""
    req = SimpleNamespace(rid="r", bootstrap_room=7, retraction_count=0)
    manager = SimpleNamespace() if fake else SimpleNamespace(prefill_info_table={})
    queue = SimpleNamespace(
        kv_manager=manager,
        scheduler=SimpleNamespace(hisparse_coordinator=object() if hisparse else None),
        _resolve_prefill_dp_rank=lambda _req: rank,
    )
    for _ in range(times):
        req.retraction_count += 1
        rebootstrap_room.create_receiver_and_enqueue(lambda *_: None, queue, req, again)
    return req


def rid_of(req: Any) -> str:
    payload = rebootstrap_room.build_rebootstrap_payload(lambda req: {"rid": req.rid, "stream": False}, req)
    return str(payload["rid"])


def test_each_time_another_id_and_room_and_the_same_on_every_rank() -> None:
    rooms = [asked_again(times).bootstrap_room for times in range(4)]
    assert len(set(rooms)) == 4 and all(0 <= room < 2**63 for room in rooms)
    assert rooms == [asked_again(times).bootstrap_room for times in range(4)]
    assert [rid_of(asked_again(times)) for times in range(3)] == ["r", "r-1", "r-2"]


@pytest.mark.parametrize("how", [{"hisparse": False}, {"again": False}, {"rank": None}, {"fake": True}], ids=str)
def test_otherwise_both_stay(how: dict[str, Any]) -> None:
    """The first time, without HiSparse, and where a prefill worker's rank is found by the room, or there is none."""
    req = asked_again(**how)
    assert (req.bootstrap_room, rid_of(req)) == (7, "r")


@pytest.mark.parametrize(("adapter", "kept"), [(None, True), ("an id", False)])
def test_kv_that_took_an_adapter_is_not_computed_again_without_it(adapter: str | None, kept: bool) -> None:
    hisparse, other = SimpleNamespace(hisparse_attn_allocator=None), SimpleNamespace()
    for pool, wanted in ((hisparse, kept), (other, True)):
        asked = SimpleNamespace(lora_id=adapter), None, None, pool, "host_pool"
        assert pd_retract.backup_kv_cache(lambda *_: True, *asked) == wanted
