"""The demo's checks fail when what they check is wrong: against a server that misbehaves in one way at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from fakes import LOG, PLAN, POOLS, SCALE, Dead, FakeLauncher, FakeServer, failed

from sglang_hisparse_plugin.demo import checks, language, plan, walks
from sglang_hisparse_plugin.demo.report import Check, Report
from sglang_hisparse_plugin.demo.server import ServerFailed
from sglang_hisparse_plugin.patching.outcome import Outcome, Refused, Skipped


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setattr(plan, "planned", lambda launcher: PLAN)
    monkeypatch.setattr(checks, "IDLE_PATIENCE", 0)
    return lambda kind=FakeServer, off=Dead: checks.run(FakeLauncher(kind, off))  # type: ignore[arg-type]


def test_a_good_server_passes_and_what_does_not_apply_is_said(run: Callable[..., Report]) -> None:
    report = run()
    assert report.passed
    not_made = [check.detail for check in report.checks if check.passed is None]
    assert not_made == ["on a CPU a stand-in did", "on a CPU the same stand-in serves as both kernels", "b"]
    assert report.figures["retractions"] == 1


def test_each_check_is_told_when_it_is_made() -> None:
    said: list[str] = []
    report = Report("0", said.append)
    report.add("a", True, "1 of 1")
    report.add("b", False, "no\nand a log")
    report.add("c", None, "not here")
    assert said == ["holds: a: 1 of 1", "FAILS: b: no", "n/a: c: not here"]
    assert set(dataclasses.asdict(report)) == {"release", "checks", "figures"}, "what a record keeps"


def test_one_wrong_token(run: Callable[..., Report]) -> None:
    class Wrong(FakeServer):
        def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
            right = super().answer(tokens, steps, rid)
            return right if rid else self.break_walk(right, steps - 1)

    assert [name[:15] for name in failed(run(Wrong))] == ["walks are exact", "walks are exact", "6 requests at o"]


def test_a_walk_that_stops_early(run: Callable[..., Report]) -> None:
    class Short(FakeServer):
        def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
            return super().answer(tokens, steps, rid)[: None if rid else -1]

    assert len(failed(run(Short))) == 3


def test_a_dead_server(run: Callable[..., Report]) -> None:
    assert not run(Dead).passed


def test_a_fault_that_breaks_nothing(run: Callable[..., Report]) -> None:
    class Immune(FakeServer):
        def break_walk(self, right: list[int], step: int) -> list[int]:
            return right

    assert len(failed(run(Immune))) == SCALE.dims.layers


def test_a_fault_that_breaks_too_early(run: Callable[..., Report]) -> None:
    class Early(FakeServer):
        def break_walk(self, right: list[int], step: int) -> list[int]:
            return super().break_walk(right, 0)

    assert len(failed(run(Early))) == SCALE.dims.layers


def test_a_leak(run: Callable[..., Report]) -> None:
    class Leaky(FakeServer):
        state = FakeServer.state | {"now": POOLS | {"host slots": 7}}

    report = run(Leaky)
    assert failed(report) == ["pools are balanced at the end"]
    assert "host slots 7 of 8" in str(report.checks)


def test_no_retraction_happened(run: Callable[..., Report]) -> None:
    class Calm(FakeServer):
        log = LOG.replace("#retracted_reqs: 1", "#retracted_reqs: 0")

    assert failed(run(Calm)) == ["requests were retracted on the way"]


def test_no_row_came_from_the_host(run: Callable[..., Report]) -> None:
    class Warm(FakeServer):
        state = FakeServer.state | {"swap_in": {"hits": 1, "misses": 0, "bytes": 0}}

    assert failed(run(Warm)) == ["rows really came from the host"]


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("ready\n#retracted_reqs: 1", "install the plugin"),
        (LOG.replace("overlay retract-order", "overlay other"), "missing: retract-order"),
        (LOG.replace("slot-count: skipped", "slot-count: applied"), "does not call for it: slot-count"),
        (LOG.replace("HiSparse overlay slot-count: skipped: b\n", ""), "not in the log: slot-count"),
        (LOG + "HiSparse overlay other: refused: x", "refused: other"),
    ],
)
def test_the_plugin_is_not_what_the_source_calls_for(run: Callable[..., Report], log: str, said: str) -> None:
    class Other(FakeServer):
        pass

    Other.log = log
    report = run(Other)
    assert failed(report) == ["the plugin is active in the server"]
    assert said in str(report.checks)


def test_a_control_that_does_not_fail(run: Callable[..., Report]) -> None:
    class Healthy(FakeServer):
        log = "ready"

    assert failed(run(off=Healthy)) == [checks.CONTROLS[0].name]


def active(report: Report) -> Check:
    return next(check for check in report.checks if check.name == "the plugin is active in the server")


def test_a_plan_that_wants_nothing_because_it_is_refused_or_empty(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing(FakeServer):
        log = "HiSparse plugin 1\n#retracted_reqs: 1"

    plans: list[tuple[dict[str, Outcome], str]] = [
        ({}, "has no overlays"),
        ({"slot-count": Refused("r", "e")}, "refused: slot-count"),
        ({"slot-count": Skipped("b")}, "not in the log: slot-count"),
    ]
    for outcomes, said in plans:
        monkeypatch.setattr(plan, "planned", lambda launcher, outcomes=outcomes: outcomes)
        check = active(run(Nothing))
        assert check.passed is False
        assert said in check.detail


def test_a_plan_that_wants_nothing_because_everything_is_fixed(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fixed(FakeServer):
        log = LOG.replace("applied: a", "skipped: a")

    monkeypatch.setattr(plan, "planned", lambda launcher: dict.fromkeys(PLAN, Skipped("fixed upstream")))
    report = run(Fixed)
    assert report.passed
    assert active(report).detail.startswith("nothing to repair")


def test_a_control_says_why_it_is_not_made(run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"retract-order": Refused("Without it x is lost", "expected y; found z"), "swap-in": Skipped("c")}
    monkeypatch.setattr(plan, "planned", lambda launcher: outcomes)
    refused, unknown = run().checks[-2:]
    assert (refused.passed, unknown.passed) == (False, False)
    assert "retract-order is refused: expected y; found z. Without it x is lost" in refused.detail
    assert "no overlay slot-count" in unknown.detail


def test_a_request_without_an_answer_is_no_defect_while_the_server_lives(run: Callable[..., Report]) -> None:
    class Slow(Dead):
        def ended(self, within: float) -> bool:
            return False

    report = run(off=Slow)
    assert failed(report) == [checks.CONTROLS[0].name]
    assert "the server lives; 4 of 4 requests: no answer (gone)" in str(report.checks)


def test_an_end_that_no_exception_explains_is_no_defect(run: Callable[..., Report]) -> None:
    class Killed(Dead):
        log = "ready"

    assert failed(run(off=Killed)) == [checks.CONTROLS[0].name]


def test_wrong_tokens_are_a_defect_and_an_old_error_in_the_log_is_no_death(run: Callable[..., Report]) -> None:
    class Wrong(FakeServer):
        log = "ImportError: an optional module\n"

        def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
            return self.break_walk(language.walk(tokens, steps), 5)

    control = run(off=Wrong).checks[-2]
    assert (control.passed, control.detail) == (True, "4 of 4 walks wrong, the first of them wrong from step 5")


def test_the_exception_that_ended_the_server_is_quoted_to_its_end(run: Callable[..., Report]) -> None:
    class Verbose(Dead):
        log = "ImportError: early\nTraceback\ntorch.OutOfMemoryError: no slots, num_reqs=2, \n\n[12:00] SIGQUIT\n"

    control = run(off=Verbose).checks[-2]
    assert (control.passed, control.detail) == (
        True,
        "the server ended: torch.OutOfMemoryError: no slots, num_reqs=2",
    )


def test_an_interruption_does_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    server = FakeServer()
    monkeypatch.setattr(walks, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        walks.together(server, [([], 0)])  # type: ignore[arg-type]
    assert server.stopped


def test_a_control_with_the_plugin_still_on(run: Callable[..., Report]) -> None:
    class On(Dead):
        log = LOG

    assert "although it is off" in str(run(off=On).checks)


def test_a_server_that_does_not_start_fails_its_part_and_the_rest_goes_on(run: Callable[..., Report]) -> None:
    class Broken(FakeServer):
        def __enter__(self) -> FakeServer:
            raise ServerFailed("the server ended while starting\nlast line of its log")

    report = run(Broken)
    assert failed(report) == ["without HiSparse", "with HiSparse and the plugin"]
    assert "last line of its log" in report.checks[0].detail
    assert report.checks[-2].passed, "the control still ran"
