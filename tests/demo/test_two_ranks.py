"""The demo's checks of tensor parallelism fail when one rank alone is wrong; and how servers start side by side."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes import LOG, PLAN, POOLS, Dead, FakeLauncher, FakeServer, failed

from sglang_hisparse_plugin.demo import checks, dp, plan, ranks
from sglang_hisparse_plugin.demo.report import Report
from sglang_hisparse_plugin.demo.server import Answer, ServerFailed
from sglang_hisparse_plugin.demo.side_by_side import SideBySide
from sglang_hisparse_plugin.demo.walks import Walk
from sglang_hisparse_plugin.patching.outcome import Applied

EXACT, UNANSWERED = Walk([], [1], [1]), Walk([], [1], None, "timed out")
LATE = "a request that comes 5 iterations later to rank {}, beside another: both exact"


class Good(FakeServer):
    log = LOG + "HiSparse overlay tp-ready: applied: d\n"
    alive, answer_patience = True, 60.0
    late = (EXACT, EXACT)


class Hangs(Good):
    late = (UNANSWERED, UNANSWERED)


class Launcher(FakeLauncher):
    tp = 2

    def server(self, name: str, plugin: str = "auto", skip: str = "", **_: object) -> FakeServer:
        return self.off() if skip else self.kind()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setattr(plan, "planned", lambda launcher: {**PLAN, "tp-ready": Applied("d")})
    monkeypatch.setattr(checks, "IDLE_PATIENCE", 0)
    monkeypatch.setattr(ranks, "_late", lambda server, scale, rank, patience: server.late)
    return lambda kind=Good, off=Hangs: ranks.run(Launcher(kind, off))  # type: ignore[arg-type]


def test_good_ranks_pass(run: Callable[..., Report]) -> None:
    report = run()
    assert report.passed, failed(report)
    names = [check.name for check in report.checks]
    assert len(names) == len(set(names)), "two checks of one name would hide one another"
    assert {LATE.format(0), LATE.format(1)} <= set(names)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_row_that_one_rank_does_not_read(run: Callable[..., Report], rank: int) -> None:
    class Immune(Good):
        def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
            return super().answer(tokens, steps, None if rid and rid.startswith(f"hisparse-fault-{rank}") else rid)

    controls = failed(run(Immune))
    assert len(controls) == 2 and all(f"on rank {rank} alone" in name for name in controls)


def test_a_leak_on_the_second_rank(run: Callable[..., Report]) -> None:
    pools = {**POOLS, "host slots of rank 1": 8}

    class Leaks(Good):
        state = {"start": pools, "now": {**pools, "host slots of rank 1": 7}, "swap_in": None}  # noqa: RUF012

    assert all("balanced" in name for name in failed(run(Leaks))) and len(failed(run(Leaks))) == 3


def test_a_request_that_one_rank_holds_up(run: Callable[..., Report]) -> None:
    assert failed(run(Hangs)) == [LATE.format(0), LATE.format(1)]


@pytest.mark.parametrize("late", [(EXACT, EXACT), (UNANSWERED, EXACT)])
def test_a_server_that_does_without_the_overlay_fails_the_control(
    run: Callable[..., Report], late: tuple[Walk, Walk]
) -> None:
    class Other(Good):
        pass

    Other.late = late
    assert failed(run(off=Other)) == [ranks.CONTROL]


def test_a_dead_server_proves_nothing(run: Callable[..., Report]) -> None:
    class Gone(Dead, Hangs):
        pass

    assert failed(run(off=Gone)) == [ranks.CONTROL]


def test_a_server_that_dies_instead_of_hanging_fails_the_control(run: Callable[..., Report]) -> None:
    class Died(Hangs):
        alive = False

    assert failed(run(off=Died)) == [ranks.CONTROL]


class Apart(Launcher):
    dp = 2


class Routed(Good):
    """Notes whose request each is, and answers those of one rank wrong."""

    bad: int | None = None
    asked: list[int | None]

    def generate(
        self, tokens: list[int], steps: int, rid: str | None = None, rank: int | None = None, temperature: float = 0
    ) -> Answer:
        type(self).asked.append(rank)
        answer = super().generate(tokens, steps, rid)
        return Answer([*answer.tokens[:-1], 0], 0) if rank is not None and rank == self.bad and not rid else answer


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_each_rank_of_dp_attention_is_asked(monkeypatch: pytest.MonkeyPatch, bad: int | None) -> None:
    class Server(Routed):
        asked: list[int | None] = []  # noqa: RUF012

    Server.bad = bad
    monkeypatch.setattr(plan, "planned", lambda launcher: {**PLAN, "tp-ready": Applied("d")})
    report = dp.run(Apart(Server, Hangs))  # type: ignore[arg-type]
    wrong = [] if bad is None else [f"walks on rank {bad} are exact while no other has requests"]
    assert failed(report) == wrong
    assert {0, 1} <= set(Server.asked)


class Counted:
    """A server that counts how often it was started and stopped."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.started, self.stopped = fails, 0, 0

    def __enter__(self) -> Counted:
        self.started += 1
        if self.fails:
            raise ServerFailed("no")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize("at_once", [True, False])
def test_servers_start_once_and_none_is_left(at_once: bool) -> None:
    good, bad, unused = Counted(), Counted(fails=True), Counted()
    with SideBySide([good, bad, unused], at_once) as servers:  # type: ignore[list-item]
        servers.begin()
        with servers.up(good) as up:  # type: ignore[arg-type]
            assert up is good and good.stopped == 0
        assert good.stopped == 1
        with pytest.raises(ServerFailed), servers.up(bad):  # type: ignore[arg-type]
            pytest.fail("it is not up")
    assert (good.started, bad.started, unused.started) == (1, 1, int(at_once))
    assert all(server.stopped for server in (good, bad, unused))
