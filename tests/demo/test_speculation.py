"""The speculative demo's checks fail when what they check is wrong: against a server that misbehaves in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import LOG, PLAN, SCALE, Dead, FakeLauncher, FakeServer, failed

from sglang_hisparse_plugin.demo import checks, plan, speculation
from sglang_hisparse_plugin.demo.report import Report
from sglang_hisparse_plugin.demo.server import Answer
from sglang_hisparse_plugin.demo.setup import Variant
from sglang_hisparse_plugin.demo.walks import Walk
from sglang_hisparse_plugin.demo.weights import Draft
from sglang_hisparse_plugin.patching.outcome import Applied, Refused

HALF = "with HiSparse, drafts half wrong: some are accepted, some are not"
RIGHT = "with HiSparse: nearly every draft is accepted"
WRONG = "control: with HiSparse, drafts wrong: none is accepted"


class Speculating(FakeServer):
    """Accepts as many drafts as the draft layer has right: 3 tokens a pass, 1.5, or 1."""

    log = LOG + "HiSparse overlay speculative: applied: d\n"
    per_pass = 0.0
    rates = {Draft.RIGHT: 3.0, Draft.HALF: 1.5, Draft.WRONG: 1.0}  # noqa: RUF012

    def verifications(self, steps: int) -> int:
        return round((steps - 1) / self.per_pass)


class Launcher(FakeLauncher):
    variant = Variant(draft_tokens=3)

    def server(self, name: str, plugin: str = "auto", draft: Draft | None = None, **_: object) -> FakeServer:
        server = super().server(name, plugin)
        if isinstance(server, Speculating):
            assert draft is not None
            server.per_pass = server.rates[draft]
        return server


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    monkeypatch.setattr(plan, "planned", lambda launcher: {**PLAN, "speculative": Applied("d")})
    monkeypatch.setattr(checks, "IDLE_PATIENCE", 0)
    return lambda kind=Speculating, off=Dead, quick=False: speculation.run(
        Launcher(kind, off),  # type: ignore[arg-type]
        quick,
    )


def with_rate(draft: Draft, rate: float) -> type[FakeServer]:
    class Other(Speculating):
        rates = {**Speculating.rates, draft: rate}  # noqa: RUF012

    return Other


def test_a_good_server_passes(run: Callable[..., Report]) -> None:
    report = run()
    assert report.passed, failed(report)
    names = [check.name for check in report.checks]
    assert len(names) == len(set(names)), "two checks of one name would hide one another"
    assert report.figures[f"acceptance: {RIGHT}"] == pytest.approx(3, abs=0.1)
    assert run(quick=True).passed


@pytest.mark.parametrize(
    ("draft", "rate", "name"),
    [
        (Draft.RIGHT, 2.5, RIGHT),
        (Draft.HALF, 1.0, HALF),
        (Draft.HALF, 3.0, HALF),
        (Draft.WRONG, 1.2, WRONG),
    ],
)
def test_acceptance_that_is_not_what_the_draft_layer_deserves(
    run: Callable[..., Report], draft: Draft, rate: float, name: str
) -> None:
    assert name in failed(run(with_rate(draft, rate)))


def test_a_server_that_does_not_speculate_at_all(run: Callable[..., Report]) -> None:
    class Plain(Speculating):
        def verifications(self, steps: int) -> int:
            return 0

    assert {RIGHT, HALF, WRONG} <= set(failed(run(Plain)))


def test_a_wrong_token_with_wrong_drafts(run: Callable[..., Report]) -> None:
    class Follows(Speculating):
        """Takes a draft that it should not have taken."""

        def answer(self, tokens: list[int], steps: int, rid: str | None = None) -> list[int]:
            right = super().answer(tokens, steps, rid)
            return self.break_walk(right, 3) if self.per_pass == 1.0 else right

    assert "with HiSparse, drafts wrong: walks are exact" in failed(run(Follows))


def test_a_wrong_token_where_drafts_are_verified_by_sampling(run: Callable[..., Report]) -> None:
    class Samples(Speculating):
        def generate(self, tokens: list[int], steps: int, *who: Any, temperature: float = 0) -> Answer:
            answer = super().generate(tokens, steps, *who)
            return replace(answer, tokens=self.break_walk(answer.tokens, 3)) if temperature else answer

    assert failed(run(Samples)) == [
        f"with HiSparse, drafts half wrong, sampled at a temperature of {speculation.COLD}: walks are exact"
    ]


def test_a_server_that_serves_without_the_plugin_fails_the_control(run: Callable[..., Report]) -> None:
    class Healthy(FakeServer):
        log = ""

    assert failed(run(off=Healthy)) == [speculation.CONTROL]


def test_a_refused_overlay_is_said_and_only_plain_servers_are_started(
    run: Callable[..., Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Refused("does not serve", "expected this, found that")
    monkeypatch.setattr(plan, "planned", lambda launcher: {**PLAN, "speculative": refused})
    report = run()
    assert failed(report) == ["HiSparse serves speculative decoding"]
    assert "expected this, found that" in report.checks[0].detail
    assert any(check.name.startswith(speculation.WITHOUT) for check in report.checks)


def test_acceptance_by_hand() -> None:
    walks = [Walk([1], [], got=[1] * 13, verifications=4), Walk([1], [], got=[1] * 7, verifications=2)]
    assert speculation.acceptance(walks) == 3.0
    assert speculation.acceptance([Walk([1], [], got=None)]) == 0.0


def test_the_hot_buffer_holds_what_a_verification_selects() -> None:
    assert SCALE.verifying(4).hot_buffer == 4 * SCALE.dims.index_topk
    assert SCALE.verifying(2).hot_buffer == SCALE.hot_buffer
