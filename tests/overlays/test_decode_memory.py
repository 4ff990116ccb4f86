"""Nobody is retracted for a decode step that SGLang is going to put off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import upstream
from sglang_hisparse_plugin.overlays import decode_memory


@pytest.mark.parametrize(("finishing", "retracted"), [([], ["staged"]), (["last token in flight"], [])])
def test_who_finishes_in_flight_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, finishing: list[str], retracted: list[str]
) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(upstream, "retract", lambda scheduler, reqs: lost.extend(reqs) or [])
    monkeypatch.setattr(upstream, "holders", lambda scheduler: [])
    coordinator = SimpleNamespace(ack_staging_queue=[SimpleNamespace(req="staged")])
    scheduler = SimpleNamespace(
        hisparse_coordinator=coordinator,
        disaggregation_mode=SimpleNamespace(name="NULL"),
        waiting_queue=[],
        _reqs_finishing_inflight=lambda batch: finishing,
    )
    request = SimpleNamespace(finished=lambda: False)
    batch = SimpleNamespace(
        hisparse_coordinator=coordinator, reqs=[request], check_decode_mem=lambda selected_indices: False
    )
    assert decode_memory.update_running_batch(lambda *_: "batch", scheduler, batch) == "batch"
    assert lost == retracted
