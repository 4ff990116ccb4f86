"""What an operator pastes, and what is read from it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hisparse_plugin import config
from sglang_hisparse_plugin.doctor import launch

MODULE = ["python", "-m", "sglang.launch_server"]
READ: dict[str, tuple[list[str], dict[str, Any]]] = {
    "module": ([*MODULE, "--model-path", "M", "--tp-size", "8"], {"model": "M", "tp": 8}),
    "equals": ([*MODULE, "--model-path=M", "--tp=8"], {"model": "M", "tp": 8}),
    "aliases": (
        [*MODULE, "--model", "M", "--tensor-parallel-size", "8", "--data-parallel-size", "2"],
        {"model": "M", "tp": 8, "dp": 2},
    ),
    "beginnings of flags": (
        [*MODULE, "--mem-fraction", "0.8", "--max-total", "64", "--disable-radix"],
        {"mem_fraction": 0.8, "max_total_tokens": 64, "disable_radix_cache": True},
    ),
    "flags alone": (["--enable-hisparse", "--dp", "2"], {"hisparse": True, "dp": 2}),
    "sglang serve": (["sglang", "serve", "org/M", "--tp", "2"], {"model": "org/M", "tp": 2}),
    "sglang serve, model as a flag": (["sglang", "serve", "--model-path", "M"], {"model": "M"}),
    "sglang serve, model last": (["sglang", "serve", "--model", "M", "--tp", "2"], {"model": "M", "tp": 2}),
    "wrappers with flags of their own": (
        ["nohup", "numactl", "--membind=0", "--cpunodebind", "0", *MODULE, "--model", "M"],
        {"model": "M"},
    ),
    "what is left of continued lines": (
        [*MODULE, "\\", "--tp", "8", "\n", " ", "--enable-hisparse"],
        {"tp": 8, "hisparse": True},
    ),
    "one word": (
        [" ".join([*MODULE, "--tp", "8", "--hisparse-config", "'{\"top_k\": 64}'"])],
        {"tp": 8, "hisparse_config": '{"top_k": 64}'},
    ),
    "flags that are not judged": ([*MODULE, "--port", "1", "--trust-remote-code", "--tp", "8"], {"tp": 8}),
    "the last one counts": ([*MODULE, "--tp", "8", "--tp", "4"], {"tp": 4}),
    "a backend of sparse attention": ([*MODULE, "--flashmla-sparse-backend", "x", "--tp", "4"], {"tp": 4}),
    "both spellings of the backends": (
        [*MODULE, "--nsa-decode-backend", "a", "--dsa-prefill-backend", "b"],
        {"decode_backend": "a", "prefill_backend": "b"},
    ),
    "negative numbers of other flags": ([*MODULE, "--chunked-prefill-size", "-1", "--tp", "2"], {"tp": 2}),
    "empty": ([], {}),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str) -> None:
    words, options = READ[name]
    read = launch.read(words)
    assert (read.options, read.problems) == (options, ()), read
    assert read.given == bool(words)


PROBLEMS = {
    "no value": [*MODULE, "--tp"],
    "a flag for a value": [*MODULE, "--tp", "--enable-hisparse"],
    "no number": [*MODULE, "--tp", "eight"],
    "no such flag": [*MODULE, "--enable-hisparce", "--hisparse-confg", "{}"],
    "a negative number": [*MODULE, "--base-gpu-id", "-1"],
    "nothing": [*MODULE, "--max-total-tokens", "0"],
    "a fraction of nothing": [*MODULE, "--mem-fraction-static", "nan"],
    "more than everything": [*MODULE, "--mem-fraction-static", "1.5"],
    "a huge number": [*MODULE, "--context-length", "9" * 50],
    "quotes": ["python -m sglang.launch_server --hisparse-config '{"],
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_the_server_would_refuse(name: str) -> None:
    assert launch.read(PROBLEMS[name]).problems


def test_every_flag_of_the_plugin_is_known() -> None:
    flags = [f"--hisparse-plugin{suffix}".replace("_", "-") for _, suffix in config._FLAGS]
    read = launch.read([*MODULE, *(word for flag in flags for word in (flag, "x"))])
    assert read.problems == ()
    assert read.options == {f"plugin_{name}": "x" for name, _ in config._FLAGS}


def test_where_it_would_run() -> None:
    read = launch.read(
        ["CUDA_VISIBLE_DEVICES=4,5", "FOO=a=b", "/opt/venv/bin/python3.11", "-m", "sglang.launch_server"]
    )
    assert read.environment == {"CUDA_VISIBLE_DEVICES": "4,5", "FOO": "a=b"}
    assert (read.program, read.container) == ("/opt/venv/bin/python3.11", False)
    assert launch.read(["env", "A=1", *MODULE]).environment == {"A": "1"}
    assert launch.read(["sudo", "docker", "run", "--gpus", "all", "image", *MODULE, "--tp", "8"]).container


def test_the_doctors_own_flags_win() -> None:
    assert launch.read([*MODULE, "--model", "M", "--tp", "8"], {"model": "N"}).options == {"model": "N", "tp": 8}
    assert launch.read([], {"model": "N"}).given


def test_a_count_is_one_where_none_makes_sense() -> None:
    for words in ([], ["--tp", "0"], ["--tp", "-3"], ["--tp", "x"]):
        assert launch.read([*MODULE, *words]).count("tp") == 1
