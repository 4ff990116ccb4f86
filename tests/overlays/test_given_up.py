"""How a PD decode worker's queues are treated around aborts, with queues and receivers of just the interface needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import config, upstream
from sglang_hisparse_plugin.overlays import given_up, late_transfer, prealloc_memory

FAILED, SUCCESS = 0, 4


class Pool:
    def __init__(self, size: int) -> None:
        self.size = size

    def available_size(self) -> int:
        return self.size


class Coordinator:
    device_buffer_size, padded_buffer_size = 64, 64
    ack_staging_queue = ()

    def __init__(self, device: int = 640, logical: int = 4096) -> None:
        self.mem_pool_host = Pool(8192)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            hisparse_attn_allocator=Pool(device), logical_attn_allocator=Pool(logical), page_size=64
        )
        self.mem_pool_device = SimpleNamespace(page_size=64)


class Rank:
    """A decode worker's scheduler, as far as its queues go; what it reduces with the other ranks is noted."""

    def __init__(self, *rids: str, coordinator: Coordinator | None = None) -> None:
        self.hisparse_coordinator = coordinator or Coordinator()
        self.running_batch = SimpleNamespace(reqs=[])
        self.waiting_queue: list[Any] = []
        self.last_batch = self.chunked_req = None
        self.reduced: list[list[bool]] = []
        self.disagg_decode_transfer_queue = self.queue([entry(rid) for rid in rids])
        self.disagg_decode_prealloc_queue = self.queue([])

    def queue(self, entries: list[Any]) -> Any:
        return SimpleNamespace(
            scheduler=self, queue=entries, gloo_group=self, num_reserved_decode_tokens=512, hisparse_lacking=None
        )

    @property
    def entries(self) -> list[Any]:
        return self.disagg_decode_transfer_queue.queue


def entry(rid: str, prompt: int = 60, **receiver: Any) -> Any:
    manager = SimpleNamespace(
        request_status={}, prefill_response_tracker={}, required_prefill_response_num_table={1: 2}
    )
    req = SimpleNamespace(
        rid=rid,
        bootstrap_room=1,
        kv_allocated_len=prompt,
        origin_input_ids=[0] * prompt,
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=16),
        finished_reason=None,
    )
    receiver = {"conclude_state": None, "kv_mgr": manager, "bootstrap_infos": [{}], "abort_notified": True} | receiver
    return SimpleNamespace(req=req, kv_receiver=SimpleNamespace(**receiver), waiting_for_input=True)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the hooks look up in SGLang and torch. A group is a rank, which notes what it reduces."""
    states = SimpleNamespace(Failed=FAILED, Success=SUCCESS)

    class Reason:
        def __init__(self, message: str, status_code: int) -> None:
            self.message, self.status_code = message, status_code

    distributed = SimpleNamespace(
        get_world_size=lambda _group: 2,
        all_reduce=lambda flags, op, group: group.reduced.append(flags),
        ReduceOp=SimpleNamespace(MIN="min"),
    )
    modules: dict[str, dict[str, Any]] = {
        "torch": {
            "distributed": distributed,
            "uint8": None,
            "tensor": lambda flags, dtype: SimpleNamespace(tolist=lambda: list(flags)),
        },
        "sglang.srt.disaggregation.base": {"KVPoll": states},
        upstream.BATCH: {"FINISH_ABORT": Reason},
        upstream.DECODE: {"CLIP_MAX_NEW_TOKEN": 4096},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def abort(rank: Rank, rid: str) -> None:
    """SGLang's own part: the receiver fails, on each rank."""

    def original(scheduler: Rank, message: Any) -> None:
        for waiting in scheduler.entries:
            if waiting.req.rid == message.rid:
                waiting.kv_receiver.conclude_state = FAILED

    given_up.abort_request(original, rank, SimpleNamespace(abort_all=False, rid=rid))


def polled(hook: Any, rank: Rank) -> list[str]:
    """Whose transfers SGLang is left to ask about; it does so on every rank together."""
    seen: list[str] = []
    hook(lambda queue: seen.extend(e.req.rid for e in queue.queue), rank.disagg_decode_transfer_queue)
    return seen


@pytest.mark.parametrize("hook", [late_transfer.pop_transferred, prealloc_memory.pop_transferred])
def test_a_transfer_that_fails_on_one_rank_alone_changes_no_collective(hook: Any) -> None:
    """A receiver whose metadata cannot be sent fails unpolled, and the other ranks do not hear of it."""
    ranks = [Rank("a", "b", coordinator=Coordinator(device=64)) for _ in range(2)]
    ranks[0].entries[1].kv_receiver.conclude_state = FAILED
    seen = [polled(hook, rank) for rank in ranks]
    assert seen[0] == seen[1] and not ranks[0].reduced and not ranks[1].reduced


def test_ranks_agree_on_what_a_client_gave_up() -> None:
    ranks = [Rank("a", "b") for _ in range(2)]
    ranks[0].entries[1].kv_receiver.conclude_state = FAILED
    for rank in ranks:
        abort(rank, "a")
    assert [polled(late_transfer.pop_transferred, rank) for rank in ranks] == [["b"], ["b"]]
    assert [len(rank.reduced) for rank in ranks] == [1, 1]


def test_a_receiver_without_a_manager_is_waited_for_by_nobody() -> None:
    """SGLang's fake transfers to 0.5.19."""
    rank = Rank("a")
    del rank.entries[0].kv_receiver.kv_mgr
    abort(rank, "a")
    assert polled(late_transfer.pop_transferred, rank) == ["a"]


@pytest.mark.parametrize(("responses", "seen"), [(set(), []), ({0}, []), ({0, 1}, ["a"])])
def test_all_that_was_sent_is_enough_though_the_transfer_stays_failed(responses: set[int], seen: list[str]) -> None:
    """From 0.5.20."""
    rank = Rank("a")
    manager = rank.entries[0].kv_receiver.kv_mgr
    manager.request_status[1] = FAILED
    manager.prefill_response_tracker[1] = responses
    abort(rank, "a")
    assert polled(late_transfer.pop_transferred, rank) == seen


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the plugin goes by."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(late_transfer, "time", clock)
    config.release_timeout.cache_clear()
    yield clock
    config.release_timeout.cache_clear()


def let_pass(clock: Any, rank: Rank, seconds: float) -> list[bool]:
    """Whether the only transfer is over, at once, after half of the time, and after all of it."""
    over = [bool(polled(late_transfer.pop_transferred, rank))]
    for _ in range(2):
        clock.now += seconds / 2
        over.append(bool(polled(late_transfer.pop_transferred, rank)))
    return over


@pytest.mark.parametrize(
    ("seconds", "over"),
    [
        ("", [False, False, True]),
        ("30", [False, False, True]),
        ("31", [False, False, False]),
        ("inf", [False, False, False]),
        ("0", [True, True, True]),
        ("soon", [False, False, True]),
    ],
)
def test_a_transfer_that_is_heard_of_no_more_is_over_after_as_long_as_sglangs_variable_says(
    seconds: str, over: list[bool], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.RELEASE_VARIABLE, seconds)
    rank = Rank("a")
    abort(rank, "a")
    assert let_pass(clock, rank, late_transfer.PATIENCE) == over


def test_when_it_is_taken_to_be_over_without_a_word_that_is_said_once(clock: Any, caplog: Any) -> None:
    rank = Rank("a", "b")
    abort(rank, "a")
    let_pass(clock, rank, late_transfer.PATIENCE)
    let_pass(clock, rank, late_transfer.PATIENCE)
    (line,) = caplog.messages
    assert all(part in line for part in ("request a ", "60 host rows", config.RELEASE_VARIABLE))


def test_a_prefill_worker_that_is_not_told_of_aborts_is_left_no_place_to_send_to(clock: Any) -> None:
    """To 0.5.12: after half of the time, once; a rank that it does not send to is a dummy to it."""
    sent: list[tuple[Any, int]] = []
    rank = Rank("a", "b")
    for waiting in rank.entries:
        receiver = waiting.kv_receiver
        receiver.bootstrap_infos = [{"rank_ip": "p", "is_dummy": False}]
        del receiver.abort_notified
        receiver.send_metadata = lambda rows, receiver=receiver: sent.append((receiver.bootstrap_infos, len(rows)))
    given_up_one, _ = rank.entries
    abort(rank, "a")
    polled(late_transfer.pop_transferred, rank)
    clock.now += late_transfer.PATIENCE / 2 - 1
    polled(late_transfer.pop_transferred, rank)
    assert not sent
    for _ in range(3):
        clock.now += 1
        assert polled(late_transfer.pop_transferred, rank) == ["b"]
    assert sent == [([{"rank_ip": "p", "is_dummy": True}], 0)]
    assert given_up_one.kv_receiver.bootstrap_infos == [{"rank_ip": "p", "is_dummy": False}]


def test_a_worker_that_slept_waits_as_long_for_what_was_begun(clock: Any) -> None:
    rank = Rank("a")
    abort(rank, "a")
    polled(late_transfer.pop_transferred, rank)
    clock.now += 10 * late_transfer.PATIENCE
    assert let_pass(clock, rank, late_transfer.PATIENCE) == [False, True, True]


def test_who_was_given_up_takes_no_hot_buffer_from_those_behind() -> None:
    rank = Rank("a", "b", coordinator=Coordinator(device=64))
    assert polled(prealloc_memory.pop_transferred, rank) == ["a"]
    abort(rank, "a")
    assert polled(prealloc_memory.pop_transferred, rank) == ["a", "b"]


def test_who_was_given_up_is_expected_to_take_nothing() -> None:
    rank = Rank("a", "b")
    abort(rank, "a")
    assert [req.rid for req in prealloc_memory._others(rank)] == ["b"]


def refused(*entries: Any, coordinator: Coordinator | None = None, lacking: Any = None, **of_queue: Any) -> list[str]:
    """What an idle worker that has taken nobody tells those it refuses."""
    rank = Rank(coordinator=coordinator)
    queue = rank.disagg_decode_prealloc_queue
    vars(queue).update(of_queue)
    queue.queue, queue.hisparse_lacking = list(entries), lacking
    prealloc_memory.pop_preallocated(lambda _queue: ([], []), queue)
    return [f"{e.req.rid}: {e.req.finished_reason.message}" for e in entries if e.req.finished_reason]


def test_who_waits_for_a_lora_adapter_is_not_refused() -> None:
    held_back = entry("behind")
    held_back.waiting_for_input = False
    assert refused(entry("a"), entry("b"), held_back, lacking=(held_back, ["host"])) == []


def test_who_never_fits_is_refused_though_another_waits_for_an_adapter() -> None:
    (message,) = refused(entry("a"), entry("b", prompt=3600))
    assert message.startswith("b: ") and "logical pool" in message


def test_the_pool_that_is_too_small_is_named() -> None:
    (message,) = refused(entry("a"), coordinator=Coordinator(device=63))
    assert "device pool" in message and "logical" not in message


def test_who_never_fits_by_what_an_older_sglang_counts_is_refused() -> None:
    """To 0.5.10.post1 it takes nobody whose tokens find no room in the device pool, too."""
    (message,) = refused(entry("a"), _allocatable_tokens=lambda: 571)
    assert "device pool" in message and "logical" not in message
    assert refused(entry("a"), _allocatable_tokens=lambda: 10_000) == []
