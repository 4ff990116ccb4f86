"""Speculation with the plugin's overlay: what `speculative.limits` raises at start is an error here."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from machine import LAUNCH, judged

from sglang_hisparse_plugin.doctor import launch, report
from sglang_hisparse_plugin.doctor.examine import Subject
from sglang_hisparse_plugin.doctor.probes import flags, model

APPLIED = {"overlays.overlays.speculative": {"outcome": "applied"}, "sglang.version": "0.5.12"}
CHAIN = [
    *("--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1", "--speculative-num-steps", "1"),
    *("--max-total-tokens", "64000"),
]


def errors(*more: str, changes: dict[str, Any] | None = None) -> list[str]:
    found = judged({**APPLIED, **(changes or {})}, [*LAUNCH, *CHAIN, *more])
    return [f"{f.what} -> {f.remedy}" for f in found.findings if f.level.name == "ERROR"]


def test_what_fits_is_ready() -> None:
    """15 buffers of 4096 + 64 slots are 62400."""
    assert errors("--speculative-num-draft-tokens", "2", "--max-running-requests", "15") == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--max-running-requests", "16"], "--max-running-requests 16 with speculative decoding is refused"),
        (["--max-running-requests", "16"], "give --max-running-requests 15"),
        ([], "without --max-running-requests SGLang takes 48"),
        (["--max-running-requests", "4", "--speculative-num-steps", "2"], "3 draft tokens select up to 6144 rows"),
        (
            ["--max-running-requests", "4", "--speculative-eagle-topk", "4"],
            "refused, for speculative_eagle_topk is 4 -> use --speculative-eagle-topk 1",
        ),
        (
            ["--max-running-requests", "4", "--speculative-algorithm", "NGRAM"],
            "refused, for speculative_algorithm is 'NGRAM' -> use --speculative-algorithm EAGLE",
        ),
        (["--max-running-requests", "4", "--pp-size", "2", "--tp-size", "4"], "pp_size is 2 -> serve without"),
        (["--max-running-requests", "4", "--speculative-adaptive"], "speculative_adaptive is True -> leave"),
    ],
)
def test_what_the_plugin_will_refuse(more: list[str], said: str) -> None:
    found = errors(*more)
    assert len(found) == 1 and said in found[0], found


OWN = {"sglang.version": "0.5.23", "sglang.speculative": True, "overlays.overlays.speculative": {"outcome": "skipped"}}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], None),
        (["--speculative-num-steps", "2"], None),  # scratch rows hold what the buffer does not
        (["--disaggregation-mode", "decode"], None),
        (["--disable-overlap-schedule"], "disable_overlap_schedule is True -> without the overlap scheduler"),
        (["--speculative-algorithm", "STANDALONE"], "speculative_algorithm is 'STANDALONE' -> use"),
        (["--speculative-num-steps", "4"], "5 draft tokens with top_k 2048: SGLang 0.5.23 takes 2 to 4"),
    ],
)
def test_sglangs_own_way(more: list[str], said: str | None) -> None:
    found = errors("--max-running-requests", "4", *more, changes=OWN)
    assert found == [] if said is None else len(found) == 1 and said in found[0], found


def test_where_nothing_serves_both() -> None:
    nowhere = {"sglang.version": "0.5.18", "overlays.overlays.speculative": {"outcome": "skipped"}}
    found = errors("--max-running-requests", "4", changes=nowhere)
    said = "SGLang 0.5.18: HiSparse with speculative decoding: this SGLang cannot serve it"
    assert any(said in line and "-> install 0.5.10 to 0.5.15" in line for line in found), found


def test_one_draft_token_is_none() -> None:
    assert any("1 draft token is the one" in line for line in errors("--speculative-num-steps", "0"))


def test_steps_are_needed_where_anything_else_is_given() -> None:
    found = judged({**APPLIED}, [*LAUNCH, "--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"]).findings
    assert any("add --speculative-num-steps 1" in f.remedy for f in found if f.level.name == "ERROR")


def test_ranks_of_dp_attention_share_the_requests() -> None:
    shared = ["--dp-size", "8", "--enable-dp-attention", "--speculative-num-draft-tokens", "2"]
    assert errors(*shared, "--max-running-requests", "120") == []
    assert "give --max-running-requests 120" in errors(*shared, "--max-running-requests", "128")[0]


def test_too_many_draft_tokens_are_an_error_without_a_gpu_too() -> None:
    found = errors(
        "--speculative-num-steps", "2", "--max-running-requests", "4", changes={"gpu.gpus": [], "gpu.nodes": {}}
    )
    assert any("3 draft tokens select up to 6144 rows" in line for line in found), found


def test_variables_before_the_command_count() -> None:
    words = ["SGLANG_NSA_FUSE_TOPK=0", *LAUNCH, *CHAIN, "--max-running-requests", "4"]
    found = [f.what for f in judged(APPLIED, words).findings if f.level.name == "ERROR"]
    assert any("SGLANG_NSA_FUSE_TOPK is off" in what for what in found)


def test_flags_are_shown_as_they_are_written() -> None:
    read = launch.read([*LAUNCH, "--context-length", "64k"])
    shown = flags.shown({"given": True, "options": dict(read.options)})
    assert '--tp-size 8 --enable-hisparse --disable-radix-cache --hisparse-config \'{"device_buffer_size"' in shown
    assert shown.endswith("--context-length 64000") and launch.read(shown.split(" --hisparse-config")[0].split()).given
    assert "'64K' can be read in two ways" in launch.read(["--context-length", "64K"]).problems[0]


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    facts = model.gather(Subject(launch.read(["--model-path", str(file)])))
    assert facts["problem"] == f"{file} is a file, and a model is a folder: give {tmp_path}"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    report.write(judged({**APPLIED, "toolchain.nvcc": None}, [*LAUNCH, *CHAIN]), out)
    wide = [line for line in out.getvalue().splitlines() if len(line) > columns]
    assert all(len(line.split()) == 1 for line in wide), wide
