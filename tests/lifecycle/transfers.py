"""The prefill worker of a decode worker, and the network between them: the one stand-in of the decode side.

Queues, requests, metadata buffers and everything that follows a poll are SGLang's; here is a receiver of its interface
whose rows and metadata arrive when the story says so: in parts, late, or never.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from .pools import content

if TYPE_CHECKING:
    from .world import World

TELLS = "_send_abort_notification"
"""A method of SGLang's receivers from 0.5.13."""
BEGUN = 10
"""Seconds that a prefill worker takes at most to send what it has begun to send."""
ADDRESS = {"bootstrap_host": "prefill", "bootstrap_port": 8998}


def _alone(tensor: torch.Tensor, *_, group=None, **__) -> None:
    """What a reduction is in a group of one."""
    assert torch.distributed.get_world_size(group) == 1


class Prefill:
    """Computes every prompt at once; sends when told. Also what a decode worker's transfer manager knows of it."""

    disaggregation_mode = deferred_bootstrap = None

    def __init__(self, world: World) -> None:
        decode = importlib.import_module("sglang.srt.disaggregation.decode")
        self.world, self.queue = world, world.scheduler.disagg_decode_prealloc_queue
        self.transfers: list[Transfer] = []
        self.unanswered: dict[int, str] = {}
        """Requests that it has not answered yet, by room; until then it takes no other of that id or in that room."""
        self.busy = False
        """It sends KV, and answers later."""
        self.prefill_info_table = SimpleNamespace(get=lambda _: SimpleNamespace(dp_size=1, follow_bootstrap_room=False))
        self.request_status: dict[int, int] = {}
        self.prefill_response_tracker: dict[int, set[int]] = {}
        self.required_prefill_response_num_table: dict[int, int] = {}
        self._deferred_ack_targets, self._staging_outstanding, self._deferred_ack_poisoned_rooms = {}, {}, set()
        common = importlib.import_module("sglang.srt.disaggregation.common.conn")
        self.real = common.CommonKVReceiver
        self.update_status = functools.partial(common.CommonKVManager.update_status, self)
        self.kv_args = getattr(self.queue.kv_manager, "kv_args", None)  # only who looks at it keeps it
        environment = importlib.import_module("sglang.srt.environ").envs
        deferred = getattr(environment, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", None)
        self.enable_deferred_decode_kv_release = deferred is not None and deferred.get()
        self.poll = importlib.import_module("sglang.srt.disaggregation.base").KVPoll
        self.queue.kv_manager = self
        decode._is_fake_transfer = lambda *_: False
        self.clock = Clock()
        if overlay := sys.modules.get("sglang_hisparse_plugin.overlays.late_transfer"):
            overlay.time = self.clock
        torch.distributed.all_reduce = _alone  # gloo's threads do not survive a fork
        get_kv_class = decode.get_kv_class
        kinds = importlib.import_module("sglang.srt.disaggregation.utils").KVClassType
        decode.get_kv_class = lambda *a: self.receiver if kinds.RECEIVER in a else get_kv_class(*a)

    def receiver(self, mgr: Prefill, bootstrap_addr: str, bootstrap_room: int) -> Transfer:
        assert mgr is self and bootstrap_addr
        self.transfers.append(Transfer(self, bootstrap_room))
        return self.transfers[-1]

    def under_way(self, rid: str = "") -> list[Transfer]:
        """The transfers of a request, or of all, that have not ended; a client's abort does not end one."""
        return [t for t in self.transfers if not t.over and rid in {"", t.rid}]

    def again(self) -> None:
        self.transfers.clear()
        known = self.request_status, self.prefill_response_tracker, self.required_prefill_response_num_table
        for told in (*known, self.unanswered):
            told.clear()
        self.busy = False
        self.clock.ahead = 0

    def submit_prefill_recompute(self, receiver: Transfer, payload: dict) -> None:
        """A retracted request's KV is computed again; also at once."""
        assert receiver in self.transfers and payload["bootstrap_room"] == receiver.bootstrap_room
        known = payload["rid"] in self.unanswered.values()
        self.world.expect(not known, f"a prefill worker that is asked again for {receiver.rid} still knows its id")
        self.unanswered[receiver.bootstrap_room] = payload["rid"]

    def answer(self, room: int) -> None:
        """As soon as it has time."""
        if not self.busy:
            self.unanswered.pop(room, None)

    def catch_up(self) -> None:
        self.busy = False
        for transfer in self.transfers:
            if transfer.over:
                self.answer(transfer.bootstrap_room)

    def is_abort_release_safe(self, room: int, _acks: int) -> bool:
        return all(t.over for t in self.transfers if t.bootstrap_room == room)

    def clear_deferred_abort_state(self, room: int) -> None:
        """Nothing is kept that would have to be forgotten."""


class Clock:
    """What the plugin goes by when it waits for a transfer; a story takes no time."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Transfer:
    """One request's KV on its way, as the decode worker's receiver."""

    require_staging = False
    supports_host_destination = False

    def __init__(self, prefill: Prefill, room: int) -> None:
        self.kv_mgr, self.bootstrap_room = prefill, room
        (req,) = (req for req in prefill.world.requests.values() if req.bootstrap_room == room)
        self.rid = req.rid
        known = room in prefill.unanswered
        prefill.world.expect(not known, f"a prefill worker that is asked again for {self.rid} still knows its room")
        if not getattr(req, "pd_rebootstrap_in_progress", False):  # a router asks both
            prefill.unanswered[room] = req.rid
        self.bootstrap_infos = [{"is_dummy": False}]
        self.conclude_state: int | None = None
        self.over = False
        if TELLS in vars(prefill.real):  # of aborts
            self.abort_notified = False
        self.told_at: float | None = None
        """When the prefill worker was told to send no more."""
        self.rows = torch.empty(0, dtype=torch.int64)
        self.written = 0
        self.aux = -1
        prefill.request_status.pop(room, None)  # of the transfer before, if its KV is computed again
        prefill.prefill_response_tracker[room] = set()
        prefill.required_prefill_response_num_table[room] = 1
        self._now(prefill.poll.Bootstrapping)

    # --- as SGLang calls it ---

    def init(self, _rank: int) -> None:
        self.status = self.kv_mgr.poll.WaitingForInput

    def send_metadata(self, kv_indices, aux_index=None, *_, **__) -> None:
        """Where the rows are to go: host rows to 0.5.12, pages of them from 0.5.13; nowhere, for a rank not used."""
        if all(info["is_dummy"] for info in self.bootstrap_infos):
            self._is_told()
            return
        world = self.kv_mgr.world
        page = world.pools.host.page_size
        rows = torch.from_numpy(kv_indices.copy()).long()[:, None] * page + torch.arange(page)
        self.rows, self.aux = rows.flatten()[: world.prompt_length(self.rid)], aux_index
        # Who was given up before stays so; where a receiver forgets it, to 0.5.19, it waits no longer than its timeout.
        self._now(self.kv_mgr.poll.Failed if self.over else self.kv_mgr.poll.Transferring)

    def poll(self) -> int:
        return self.status if self.conclude_state is None else self.conclude_state

    def abort(self) -> None:
        self.conclude_state = self.kv_mgr.poll.Failed
        if hasattr(self, "abort_notified"):
            self.ensure_abort_notified()
        self._now(self.kv_mgr.poll.Failed)

    def ensure_abort_notified(self, **_) -> None:
        self.abort_notified = True
        self._is_told()

    def failure_exception(self) -> None:
        raise RuntimeError("the prefill worker gave up")

    def clear(self) -> None:
        """Nothing is kept that would have to be forgotten."""

    def _is_told(self) -> None:
        self.told_at = self.told_at or self.kv_mgr.clock.monotonic()

    # --- as the story tells it ---

    @property
    def sending(self) -> bool:
        return self.aux >= 0 and not self.over

    @property
    def stopped(self) -> bool:
        """Told to send no more, and done with what it had begun to send."""
        return self.told_at is not None and self.kv_mgr.clock.monotonic() > self.told_at + BEGUN

    def write(self, upto: int) -> None:
        """Rows arrive, wherever they were to go when the transfer began."""
        if self.stopped:
            return
        world, req = self.kv_mgr.world, self.kv_mgr.world.requests[self.rid]
        new = slice(self.written, upto)
        mine = set(world.pools.host_rows_of(req))
        lost = [row for row in self.rows[new].tolist() if row not in mine]
        world.expect(not lost, f"the transfer of {self.rid} writes host rows that are not its own any more: {lost[:6]}")
        tokens = req.origin_input_ids[0] + torch.arange(self.written, upto)
        for layer, rows in enumerate(world.pools.host_rows()):
            rows[self.rows[new]] = content(tokens, layer)
        self.written = max(self.written, upto)

    def part(self) -> None:
        self.write((self.written + len(self.rows) + 1) // 2)

    def land(self) -> None:
        """The rest of the rows, and the first token, which the prefill worker computed."""
        if self.stopped:
            self.over = True
            return
        self.write(len(self.rows))
        world, buffers = self.kv_mgr.world, self.kv_mgr.queue.metadata_buffers
        req = world.requests[self.rid]
        buffers.output_ids[self.aux][0] = req.origin_input_ids[0] + len(self.rows)
        buffers.bootstrap_room[self.aux][0] = self.bootstrap_room
        self.over = True
        self.kv_mgr.prefill_response_tracker[self.bootstrap_room].add(0)
        self._now(self.kv_mgr.poll.Success)
        self.kv_mgr.answer(self.bootstrap_room)

    def fail(self) -> None:
        """The prefill worker gives up; nothing more is sent."""
        self.over = True
        self._now(self.kv_mgr.poll.Failed)
        self.kv_mgr.answer(self.bootstrap_room)

    def _now(self, status: int) -> None:
        """As SGLang notes it: from 0.5.20 what has failed stays so."""
        self.kv_mgr.update_status(self.bootstrap_room, status)
        self.status = self.kv_mgr.request_status[self.bootstrap_room]
