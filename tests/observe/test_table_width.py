"""The table of the example's client fits a terminal of 80 columns, with every number whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from rich.console import Console

CLIENT = Path(__file__).parents[2] / "examples" / "speculative" / "client.py"


def test_the_clients_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("hisparse_example_client", CLIENT)
    assert spec and spec.loader
    client = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, client)  # its dataclasses look for it there
    spec.loader.exec_module(client)
    row = {"mode": "speculative", "kernel": "upstream", "concurrency": 64, "context": 131072, "tokens_per_s": 12345.6}
    client.show([row | {"ms_per_token": 1234.5, "acceptance": 2.96, "hit_rate": 1.0}], Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["speculative", "upstream", "64", "131072", "12345.6", "1234.5", "2.96", "100%"]
