"""The flags of a plan, pasted into a shell and given to the real ServerArgs of a release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lifecycle import server as lifecycle

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.demo import cpu, releases
from sglang_hisparse_plugin.sizing import headroom
from sglang_hisparse_plugin.sizing.shapes import version

TESTS = Path(__file__).parents[1]
GPU_GIB = 139
CONFIG = {
    **lifecycle.MODEL,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
MEMORY = [f"--gpu-mem={GPU_GIB}", "--weights-per-gpu=80G", "--host-mem=2T", "--context=64k"]
LAYOUTS: dict[str, list[str]] = {
    "one GPU": [],
    "DP attention": ["--tp=8", "--dp=8", "--dp-attention"],
    "replicas": ["--tp=4", "--dp=2"],
    "two nodes": ["--tp=16", "--dp=4", "--dp-attention"],
}
DRAFTS = {"0.5.12": 2, "0.5.23": 4}


def parsed(release: str, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sglang = releases.fetch(release)
    # By default SGLang keeps memory for a GPU it takes itself to run on; the stand-ins would have it be a CPU's.
    env = cpu.environment(sglang) | {"SGLANG_HISPARSE_PLUGIN": "off", "SGLANG_USE_CPU_ENGINE": "0"}
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-m", "sizing.parsed"]
    done = subprocess.run(
        command, env=env, input=json.dumps(jobs), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """A report, and the words that a shell makes of the flags as they are printed for people."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = ["size", f"--model={tmp_path}", *MEMORY, *arguments]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    text = capsys.readouterr().out
    block = text[text.index("Flags, besides --model-path:\n") :].split("\n\n")[0].partition("\n")[2]
    assert all(len(line) <= 80 for line in block.splitlines())
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {block}"], capture_output=True, text=True, check=True).stdout
    return report, words.splitlines()


def without(flag: str, words: list[str]) -> list[str]:
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


@pytest.mark.parametrize("release", list(DRAFTS))
def test_sglang_takes_them_for_what_they_say(release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs, reports = [], []
    for name, layout in LAYOUTS.items():
        for drafts in (0, DRAFTS[release]):
            report, words = plan(
                capsys, tmp_path, f"--release={release}", *layout, f"--draft-tokens={drafts}",
                '--hisparse-config={"device_buffer_size": 8192}',
            )  # fmt: skip
            more = ["--dist-init-addr=127.0.0.1:1"] if name == "two nodes" else []
            each = {"gpu_mib": GPU_GIB << 10, "config": CONFIG}
            jobs += [
                {**each, "flags": [*words, *more]},
                {**each, "flags": [*without("--mem-fraction-static", words), *more]},
            ]
            reports.append(report)
    found = parsed(release, jobs)
    for report, told, by_itself in zip(reports, found[::2], found[1::2], strict=True):
        assert "refused" not in told, told
        fit, dp = report["hisparse"], report["dp"] if report["dp_attention"] else 1
        assert json.loads(told["hisparse_config"]) == {
            "device_buffer_size": 8192,
            "host_to_device_ratio": fit["host_to_device_ratio"],
        }
        wanted = {
            "tp_size": report["tp"],
            "dp_size": report["dp"],
            "enable_dp_attention": report["dp_attention"],
            "nnodes": -(-report["tp"] // 8),
            "enable_hisparse": True,
            "kv_cache_dtype": "fp8_e4m3",
            "page_size": 64,
            "context_length": 64000 + 2048,
            "max_running_requests": fit["requests_per_rank"] * dp,
            "max_total_tokens": fit["device_tokens"],
            "mem_fraction_static": report["machine"]["mem_fraction_static"],
            "graphs": fit["requests_per_rank"],
        }
        assert {key: told[key] for key in wanted} == wanted
        drafts = report["draft_tokens"]
        speculation = ["EAGLE", drafts - 1, 1, drafts] if drafts else [None] * 4
        names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
        assert [told[f"speculative_{name}"] for name in names] == speculation
        _as_much_as_sglang_keeps(report, by_itself["mem_fraction_static"])


def _as_much_as_sglang_keeps(report: dict[str, Any], own: float) -> None:
    """Rounded down, not to the nearest thousandth; without DP attention some releases leave out the prefill graphs."""
    mine = report["machine"]["mem_fraction_static"]
    in_vain = 0 if report["dp_attention"] else headroom.PREFILL_GRAPHS / (GPU_GIB << 10)
    assert mine - 0.0006 <= own <= mine + in_vain + 0.0016
    if report["dp_attention"] and version(report["release"]) < (0, 5, 14) and report["draft_tokens"]:
        assert own < 0.9  # the draft model's share is in it


def test_control_sglang_would_say_what_it_does_not_take() -> None:
    flags = ["--enable-hisparse", "--tp-size=6", "--dp-size=4", "--enable-dp-attention"]
    found = parsed("0.5.12", [{"gpu_mib": 1024, "config": CONFIG, "flags": flags}] * 1)
    assert "AssertionError" in found[0]["refused"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp=7"], "128 attention heads cannot be divided among 7 ranks"),
        (["--tp=8", "--gpus-per-node=3"], "--tp 8 does not fill nodes of 3 GPUs"),
        (["--tp=8", "--dp-attention"], "--dp-attention without --dp"),
        (["--tp=8", "--dp=3", "--dp-attention"], "--dp 3 does not divide --tp 8"),
        (["--tp=8", "--dp=2"], "take 16 GPUs, and a node has 8"),
        (["--tp=8", "--reserve=1"], "makes --mem-fraction-static 0.992: above 0.99"),
        (["--tp=8", "--reserve=0"], "Give 1.4 GiB or more, or leave --reserve out: SGLang itself keeps 15.0 GiB"),
        (["--tp=8", "--draft-tokens=1"], "1 is no speculation: give 2 or more"),
        (["--tp=8", '--hisparse-config={"top_k":1000}'], "top_k 1000 in --hisparse-config is not the 2048"),
        (["--tp=8", '--hisparse-config={"device_buffer":8192}'], "takes no notice of: device_buffer; it knows top_k"),
        (["--tp=8", '--hisparse-config={"device_buffer_size":8192.0}'], "--hisparse-config is 8192.0: a whole"),
        (["--tp=8", '--hisparse-config={"device_buffer_size":"8192"}'], 'is "8192": a whole number'),
        (["--tp=8", '--hisparse-config={"host_to_device_ratio":null}'], "is null: a whole number"),
        (["--tp=8", '--hisparse-config={"swap_in_block_size":true}'], "is true: a whole number"),
        (["--tp=8", "--hisparse-config=[1]"], "--hisparse-config is no JSON object: [1]"),
        (["--tp=8", "--hisparse-config={'top_k': 1}"], "is no JSON (from character 2 on)"),
        (["--tp=8", "--hisparse-config="], "is no JSON (from character 1 on)"),
    ],
)  # fmt: skip
def test_what_sglang_refuses_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    try:
        code = main(["size", f"--model={tmp_path}", *MEMORY, "--json", *arguments])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    assert code == 2 and said in json.loads(printed.out)["error"]
    assert said in " ".join(printed.err.split()) and all(len(line) <= 80 for line in printed.err.splitlines())


def test_what_is_replaced_or_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = '--hisparse-config={"host_to_device_ratio":3,"page_size":64}'
    report, words = plan(capsys, tmp_path, "--tp=8", given)
    ratio = report["hisparse"]["host_to_device_ratio"]
    assert ratio != 3 and f"replaced by the one worked out, {ratio}" in report["notes"][0]
    assert json.loads(words[words.index("--hisparse-config") + 1])["page_size"] == 64
    assert report["machine"]["reserve_origin"] == "as SGLang itself reckons"
    report, _ = plan(capsys, tmp_path, "--tp=8", "--reserve=4")
    assert report["machine"]["reserve_origin"] == "--reserve"
    assert any("the reserve is 4.0 GiB, and SGLang itself would keep 15" in note for note in report["notes"])
