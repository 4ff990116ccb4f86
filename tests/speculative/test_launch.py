"""What is told from arguments alone; that servers end so is seen in tests/activation."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import config, installation, launch_check, refusals, upstream
from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.speculative import limits


@pytest.mark.parametrize(
    "text",
    [None, "", "{}", '{"top_k": 2048, "device_buffer_size": 2048}', '{"top_k": 64}', '{"host_to_device_ratio": 1}'],
)
def test_a_configuration_that_serves(text: str | None) -> None:
    assert not list(launch_check.hisparse_config(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{device_buffer_size: 4096}", "is no JSON object: {device_buffer_size: 4096}: write it in single quotes"),
        ("[4096]", "is no JSON object: [4096]"),
        ('{"host_to_device_ratio": 2.0}', "host_to_device_ratio is 2.0 in --hisparse-config: give a whole number"),
        ('{"host_to_device_ratio": "2"}', 'host_to_device_ratio is "2" in'),
        ('{"host_to_device_ratio": 0}', "host_to_device_ratio is 0 in"),
        ('{"top_k": true}', "top_k is true in"),
        ('{"device_buffer_size": null}', "device_buffer_size is null in"),
        ('{"device_buffer_size": 4100}', "4100, no multiple of the page of 64 tokens"),
        ('{"device_buffer_size": 4100}', "would end the server: set it to 4160 in --hisparse-config"),
        ('{"top_k": 33}', "device_buffer_size is 66, no multiple of the page"),
        ('{"device_buffer_size": 128}', "128, less than the top_k of 2048, SGLang's default: set it to 2048"),
        ('{"top_k": 200, "device_buffer_size": 128}', "128, less than the top_k of 200: set it to 256 in"),
    ],
)
def test_a_configuration_that_would_end_the_server(text: str, says: str) -> None:
    (problem,) = launch_check.hisparse_config(text)
    assert says in problem


def test_the_models_own_top_k_counts() -> None:
    assert not list(launch_check.hisparse_config('{"top_k": 64, "device_buffer_size": 128}', 128))
    (problem,) = launch_check.hisparse_config('{"top_k": 64, "device_buffer_size": 128}', 2048)
    assert "128, less than the top_k of 2048: set it to 2048" in problem


@pytest.mark.parametrize(
    ("release", "mode", "backend", "says"),
    [
        ("0.5.12", "decode", "nixl", "use mooncake, or SGLang 0.5.13"),
        ("0.5.10.post1", "decode", "mori", "use mooncake, or SGLang 0.5.13"),
        ("0.5.12", "decode", "mooncake", ""),
        ("0.5.13", "decode", "nixl", ""),
        ("0.5.12", "prefill", "nixl", "leave --enable-hisparse to the decode server"),
        ("0.5.23", "prefill", "mooncake", "leave --enable-hisparse to the decode server"),
        ("0.5.23", "null", "mooncake", ""),
    ],
)
def test_who_brings_kv_to_a_decode_server(release: str, mode: str, backend: str, says: str) -> None:
    given = SimpleNamespace(disaggregation_mode=mode, disaggregation_transfer_backend=backend)
    tree = installation.find(releases.fetch(release)).tree
    problems = [str(problem) for problem in refusals.problems(given, lambda: refusals.takes_tokens(tree))]
    assert len(problems) == bool(says) and all(says in problem for problem in problems)


@pytest.mark.parametrize(
    ("mode", "stages", "serves"), [("decode", 2, False), ("decode", 1, True), ("null", 2, True), ("prefill", 2, True)]
)
@pytest.mark.parametrize("name", ["pp_size", "pipeline_parallel_size"])
def test_pipeline_stages_decode_only_what_they_prefill(mode: str, stages: int, serves: bool, name: str) -> None:
    given = SimpleNamespace(disaggregation_mode=mode, **{name: stages})
    problems = " ".join(map(str, refusals.problems(given, lambda: False)))
    assert ("use --tp-size instead" not in problems) == serves


def test_a_streaming_session_is_refused_when_arguments_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve(monkeypatch, arguments(hisparse_config="{}", enable_streaming_session=True))
    assert ended.value.code == 1 and "--enable-streaming-session keeps a request's KV" in capsys.readouterr().err
    assert serve(monkeypatch, arguments(hisparse_config="{}", enable_streaming_session=False)) == "parsed"


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"enable_hisparse": True, "hisparse_config": '{"device_buffer_size": 4100}'} | changed)


def serve(monkeypatch: pytest.MonkeyPatch, given: SimpleNamespace, mode: str = "auto") -> str:
    monkeypatch.setenv(config.MODE_VARIABLE, mode)
    monkeypatch.delenv(config.SKIP_VARIABLE, raising=False)
    return str(launch_check.from_cli_args(lambda cls, namespace: "parsed", object, given))


@pytest.mark.parametrize(
    ("given", "mode"), [(arguments(enable_hisparse=False), "auto"), (arguments(), "off"), (SimpleNamespace(), "auto")]
)
def test_nobody_else_is_stopped(given: SimpleNamespace, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve(monkeypatch, given, mode) == "parsed"


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_one_line_and_exit_code_1(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve(monkeypatch, arguments(), mode)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("HiSparse plugin: device_buffer_size is 4100")


def test_the_later_check_ends_an_engine_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, limits.ends_the_process():
        raise limits.Unsupported("why")
    assert ended.value.code == 1 and capsys.readouterr().err == "HiSparse plugin: why\n"


@pytest.mark.parametrize(
    ("release", "skip", "missed"),
    [
        ("0.5.12", "speculative", "speculative"),
        ("0.5.11", "retract-once", "speculative"),  # which requires it
        ("0.5.12", "observe", None),
        ("0.5.18", "speculative-guard", "speculative-guard"),
        ("0.5.18", "speculative", None),
        ("0.5.23", "speculative,speculative-guard", None),
    ],
)
def test_what_is_left_out_is_missed_where_speculation_needs_it(
    release: str, skip: str, missed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = installation.Installation(releases.fetch(release))
    monkeypatch.setattr(installation, "find", lambda: sglang)
    monkeypatch.setenv(config.SKIP_VARIABLE, skip)
    warnings = list(launch_check.left_out(arguments(speculative_algorithm="EAGLE")))
    assert len(warnings) == (missed is not None)
    assert missed is None or f"overlay {missed}, which speculation needs, is not applied (" in warnings[0]
    assert not list(launch_check.left_out(arguments(speculative_algorithm=None)))


def test_a_scheduler_says_so_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[int] = []
    monkeypatch.setattr(installation, "find", lambda: installation.Installation(releases.fetch("0.5.18")))
    monkeypatch.setenv(config.MODE_VARIABLE, "auto")
    monkeypatch.setenv(config.SKIP_VARIABLE, "speculative-guard")
    given = arguments(hisparse_config=None, speculative_algorithm="EAGLE")
    launch_check.scheduler_init(lambda *_: said.append(len(caplog.records)), object(), given)
    assert said == [1] and "overlay speculative-guard, which speculation needs" in caplog.text


@pytest.mark.parametrize(
    ("steps", "buffer", "skip", "says"),
    [
        (3, 6144, "", "3 draft tokens are verified by the plugin's swap-in kernel: faster up to 3"),
        (4, 8192, "", "4 draft tokens are verified by SGLang's swap-in kernel: the plugin's is faster up to 3 only"),
        (2, 2048, "", "by SGLang's swap-in kernel: 2 x 2048 rows exceed the hot buffer of 2048"),
        (2, 4096, "swap-in", "by SGLang's swap-in kernel: overlay swap-in is not applied"),
    ],
)
def test_whose_kernel_verifies(
    steps: int, buffer: int, skip: str, says: str, started: Callable[..., SimpleNamespace]
) -> None:
    (line,) = launch_check.verified_by(started("0.5.23", steps, buffer, skip))
    assert says in line


def test_it_is_said_when_the_scheduler_starts(
    started: Callable[..., SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    given = started("0.5.23", 2, 4096)
    with caplog.at_level("INFO"):
        launch_check.scheduler_init(lambda *_: None, object(), given)
    assert caplog.messages == [f"HiSparse plugin: {line}" for line in launch_check.verified_by(given)]


def test_where_the_plugin_speculates_nothing_is_said_of_kernels(started: Callable[..., SimpleNamespace]) -> None:
    assert not list(launch_check.verified_by(started("0.5.15", 2, 4096)))
    assert not list(launch_check.verified_by(started("0.5.23", 2, 4096, algorithm=None)))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """The arguments of a server of DeepSeek-V3.2 on a release, as SGLang has made them."""

    def of(
        release: str, steps: int, buffer: int, skip: str = "", *, algorithm: str | None = "EAGLE"
    ) -> SimpleNamespace:
        monkeypatch.setattr(installation, "find", lambda: installation.Installation(releases.fetch(release)))
        monkeypatch.setattr(upstream, "model_and_top_k", lambda *_: (["DeepseekV32ForCausalLM"], 2048))
        monkeypatch.setattr(upstream, "resolved", lambda given: given)
        monkeypatch.setenv(config.MODE_VARIABLE, "auto")
        monkeypatch.setenv(config.SKIP_VARIABLE, skip)
        given = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": steps, "speculative_num_steps": 1}
        given |= {"max_running_requests": 4, "max_total_tokens": None, "attn_dp_size": 1, "model_path": "m"}
        return arguments(hisparse_config=json.dumps({"device_buffer_size": buffer}), **given)

    return of
