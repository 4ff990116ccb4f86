"""A pool runs out while a server speculates: the youngest goes back, who can never fit is refused, others go on."""

from __future__ import annotations

import pytest

from .test_rows import _case, _cases

EXACT = ("counted", "host-runs-out", "device-full", "long-answer", "buffer-counts", "waits-for-room", "never-fits")


@pytest.mark.parametrize(("release", "name"), _cases([*EXACT]))
def test_the_server_goes_on(release: str, name: str) -> None:
    result = _case(release, name)
    assert not result["found"], "\n".join(result["found"])
    assert result.get("steps", 160) == 160


@pytest.mark.parametrize(("release", "name"), _cases(["control-uncounted"]))
def test_slots_that_nobody_counted_are_missed(release: str, name: str) -> None:
    result = _case(release, name)
    assert not result["before"]
    assert any("host" in text for text in result["found"]), result["found"]
