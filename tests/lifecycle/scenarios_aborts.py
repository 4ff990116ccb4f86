"""Clients that give up, at each point of a request's life."""

from __future__ import annotations

from collections.abc import Callable

from .scenarios import decoded, finish, scenario
from .world import World


@scenario
def abort_staged(w: World) -> None:
    """Staging has outlived its batch when the client gives up; the end of the transfer comes after that."""
    _beside_one_that_decodes(w)
    w.hold_staging()
    w.run(2)
    _give_up(w, "gone")
    w.release_staging()
    w.run_until(lambda: w.ends("decodes"))
    _over(w)


@scenario
def abort_transferred(w: World) -> None:
    """The transfer has ended, but nobody has looked yet, when the client gives up."""
    _beside_one_that_decodes(w)
    _give_up(w, "gone")
    w.run_until(lambda: w.ends("decodes"))
    _over(w)


@scenario
def abort_everything(w: World) -> None:
    """All requests are aborted: one decodes, one is staging, one waits."""
    _beside_one_that_decodes(w)
    w.hold_staging()
    w.run(2)
    w.submit("late", prompt=900, output=4)
    w.scheduler.running_batch.batch_is_full = True
    w.abort_all()
    w.run(3)
    for rid in w.requests:
        w.expect(w.ends(rid) == ["abort"], f"{rid} ended as {w.ends(rid)}, not as aborted once")
    w.expect_at_rest()


@scenario
def abort_slow_transfer(w: World) -> None:
    """The transfer is really still going on when the client gives up, and the next request gets what it leaves."""
    transfers = _slow_transfers(w)
    w.submit("gone", prompt=200, output=12)
    w.run_until(lambda: w.staging("gone"))
    w.hold_staging()
    w.run(2)
    _give_up(w, "gone")
    w.submit("next", prompt=230, output=12)
    w.run_until(lambda: w.staging("next"))
    late = len(transfers) - 1
    for copy in transfers:
        copy()
    w.expect(not late, "a transfer goes on into slots that are the next request's")
    w.release_staging()
    w.run_until(lambda: w.ends("next"))
    w.run(2)
    w.expect_ended("next")
    w.expect_at_rest()


# --- parts of stories ---


def _beside_one_that_decodes(w: World) -> None:
    w.submit("decodes", prompt=110, output=24)
    w.run_until(lambda: decoded(w, 3, "decodes"))
    w.submit("gone", prompt=200, output=12)
    w.run_until(lambda: w.staging("gone"))


def _give_up(w: World, rid: str) -> None:
    """The client's abort arrives: answered at once, and nothing is done for the request any more."""
    tokens = len(w.requests[rid].output_ids)
    w.abort(rid)
    w.run(1)
    w.release_staging()
    w.run(3)
    w.expect(len(w.requests[rid].output_ids) == tokens, "the aborted request was decoded")
    w.expect(w.ends(rid) == ["abort"], f"ended as {w.ends(rid)}, not as aborted once")
    w.expect(not (w.staging(rid) or w.waiting(rid) or w.decoding(rid)), "the aborted request is still there")


def _over(w: World) -> None:
    finish(w, "decodes")
    w.expect(w.ends("gone") == ["abort"], f"ended as {w.ends('gone')}, not as aborted once")
    w.submit("next", prompt=230, output=8)
    w.run_until(lambda: w.ends("next"))
    finish(w, "decodes", "next")


def _slow_transfers(w: World) -> list[Callable[[], object]]:
    """Staging copies nothing until somebody waits for its stream; what is still to be copied."""
    todo: list[Callable[[], object]] = []
    host, stream = w.pools.host, w.coordinator.write_staging_stream
    admit, copy, wait = w.coordinator.admit_request_into_staging, host.backup_from_device_all_layer, stream.synchronize

    def admitted(req):
        host.backup_from_device_all_layer = lambda *args, **kwargs: todo.append(lambda: copy(*args, **kwargs))
        try:
            return admit(req)
        finally:
            host.backup_from_device_all_layer = copy

    def waited():
        while todo:
            todo.pop(0)()
        return wait()

    w.coordinator.admit_request_into_staging, stream.synchronize = admitted, waited
    w.pools.check_staged = lambda _req: ()  # nothing is there yet
    return todo
