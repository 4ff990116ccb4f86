"""The examples of docs/operating.md are what the command says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_hisparse_plugin.cli import main

from .cases import CONFIG

TEXT = (Path(__file__).parents[2] / "docs" / "operating.md").read_text("utf-8")
NODE = ["--gpu-mem=139", "--weights=690GB", "--tp=8", "--release=0.5.23", "--host-mem=2TB"]
DP = ["--dp=8", "--dp-attention"]
ROWS = {
    "8Ki | fp8": DP,
    "32Ki | fp8": DP,
    "64Ki | fp8": DP,
    "128Ki | fp8": DP,
    "128Ki | bf16": [*DP, "--kv-dtype=bfloat16"],
    "128Ki, 1 TB host | fp8": [*DP, "--host-mem=1TB"],
    "128Ki, 4 draft tokens | fp8": [*DP, "--draft-tokens=4"],
    "128Ki, TP without DP attention | fp8": [],
}


@pytest.mark.parametrize("name", ROWS)
def test_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompt = re.match(r"\w+", name)[0]
    assert main(["size", f"--model={tmp_path}", *NODE, f"--context={prompt}", "--json", *ROWS[name]]) == 0
    report = json.loads(capsys.readouterr().out)
    fit, without = report["hisparse"], report["without"]
    limit = fit["limit"].replace("GPU memory; most of it for ", "GPU: ").replace(", prefill", "")
    row = f"| {name} | {fit['requests']} / {without['requests']} | {limit} | {fit['host_bytes'] / (1 << 30):.0f} GiB |"
    assert row in TEXT


def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["size", f"--model={tmp_path}", *NODE, *DP, "--context=64Ki"]) == 0
    flags = capsys.readouterr().out.partition("Flags, besides --model-path:\n")[2].partition("\n\n")[0]
    assert f"```\n{flags}\n```" in TEXT
