"""The real server under clients that stream, abort and disconnect; its own control is part of what it reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from demo_command import held, refused

SECONDS = 12


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "seconds"), [("--tp=1", SECONDS), ("--tp=2", 3 * SECONDS)])
def test_a_server_survives_its_clients(ranks: str, seconds: float, tmp_path: Path) -> None:
    report = held(f"--load={seconds}", "--release=0.5.12", ranks, work=tmp_path)["releases"][0]
    assert all(check["passed"] for check in report["checks"])
    counts = {kind: report["figures"][kind] for kind in ("exact", "aborted", "disconnected", "refused")}
    assert sum(counts.values()) == report["figures"]["requests"] > 0
    assert counts["refused"] == 0, "there is room for every request"


@pytest.mark.gpu
def test_a_gpu_server_survives_its_clients(tmp_path: Path) -> None:
    held("--load=60", "--device=cuda", work=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--load=0"], "seconds above 0"),
        (["--load=nan"], "seconds above 0"),
        (["--seed=3"], "--seed goes with --load"),
        (["--load=5", "--speculative"], "take one of them"),
    ],
)
def test_wrong_use(arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)
