"""Whatever the arguments are, `size`, `doctor` and `bench` end with 0, 1 or 2 and say why, in lines of the terminal."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from machine import CHECKOUT, DSA, HEALTHY, LAUNCH

from sglang_hisparse_plugin.cli import doctor, main
from sglang_hisparse_plugin.doctor import examine, sandbox

RECORD = str(CHECKOUT / "docs" / "measurements" / "swap_in_h200.json")
SIZE = ["--gpu-mem=139", "--weights-per-gpu=80", "--host-mem=2T", "--context=8k", "--tp=8"]
WORDS = (
    *("", "-", "--", "'", "0", "1", "2", "3", "7", "8", "-1", "64", "64k", "64Ki", "64K", "1M", "139G", "2TB", "1e9"),
    *("nan", "inf", "{}", "[]", '{"top_k": 2048}', '{"device_buffer_size": 8192}', '{"host_to_device_ratio": 1e999}'),
    *("1000000000", "9" * 5000, "/", "/dev/null", "0.5.12", "0.5.15", "0.5.23", "0.5.99", "fp8_e4m3", "0.5,0.9"),
)
VALUES = st.one_of(
    st.sampled_from(WORDS), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
)
OPTIONS = {
    "size": (
        *("--model", "--layers", "--kv-lora-rank", "--index-head-dim", "--index-topk", "--draft-layers", "--kv-dtype"),
        *("--draft-tokens", "--hisparse-config", "--release", "--gpu-mem", "--weights", "--weights-per-gpu", "--tp"),
        *("--reserve", "--host-mem", "--host-reserve", "--context", "--output", "--max-requests", "--hit-rates"),
        *("--dp", "--dp-attention", "--gpus-per-node", "--json"),
    ),
    "bench": ("--json=-", "--quick", "--from", "--engine"),
    "doctor": ("--json", "--model", "--hisparse-config", "--context-length", "--time-limit", "--no-transfer"),
    "launch": (
        *("--tp", "--dp", "--enable-dp-attention", "--hisparse-config", "--context-length", "--max-total-tokens"),
        *("--mem-fraction-static", "--page-size", "--kv-cache-dtype", "--max-running-requests", "--nnodes"),
        *("--pp-size", "--speculative-algorithm", "--speculative-num-draft-tokens", "--speculative-eagle-topk"),
        "--base-gpu-id",
    ),
}  # fmt: skip


def words(command: str) -> st.SearchStrategy[list[str]]:
    word = st.one_of(
        st.sampled_from(OPTIONS[command]).map(lambda option: [option]),
        st.tuples(st.sampled_from(OPTIONS[command]), VALUES).map(lambda pair: [f"{pair[0]}={pair[1]}"]),
        st.tuples(st.sampled_from(OPTIONS[command]), VALUES).map(list),
    )
    return st.lists(word, max_size=4).map(lambda parts: [word for part in parts for word in part])


def ends_well(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
    assert code in (0, 1, 2)
    said = out.getvalue() + err.getvalue()
    assert said.strip()
    if any(word.startswith("--json") for word in arguments):
        return
    wide = [line for line in said.splitlines() if len(line) > 80 and max(map(len, line.split())) < 60]
    assert not wide


FEW = settings(
    max_examples=100, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**DSA, "num_attention_heads": 128}))
    return tmp_path


@FEW
@example(["--gpu-mem=--"])
@example(["--context=64K"])
@example(["--model=" + "9" * 5000])
@given(words("size"))
def test_size(model: Path, more: list[str]) -> None:
    ends_well(["size", f"--model={model}", *SIZE, *more])


@FEW
@given(words("bench"))
def test_bench(model: Path, more: list[str]) -> None:
    ends_well(["bench", f"--from={RECORD}", *more])


@FEW
@given(words("doctor"), words("launch"))
def test_doctor(model: Path, more: list[str], flags: list[str]) -> None:
    """With the facts of a machine on which nothing is wrong, so that nothing is gathered."""
    facts = {name: sandbox.Outcome(value=value) for name, value in HEALTHY.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            doctor.examine, "examine", lambda subject, probes: examine.judge(examine.Examined(subject, facts), probes)
        )
        patched.setattr("signal.signal", lambda *_: None)
        ends_well(["doctor", *more, "--", *LAUNCH, *flags])


@pytest.mark.parametrize("command", ["size", "bench", "doctor"])
def test_help_is_as_wide_as_the_terminal(model: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
