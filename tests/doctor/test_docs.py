"""The documentation names every probe and every option."""

from __future__ import annotations

import argparse
import re

from machine import CHECKOUT

from sglang_hisparse_plugin.cli import doctor
from sglang_hisparse_plugin.doctor.table import PROBES


def test_operating_names_every_probe_and_option() -> None:
    text = (CHECKOUT / "docs" / "operating.md").read_text("utf-8")
    section = text.partition("\n## Doctor\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    options = {name for action in parser._actions for name in action.option_strings if name.startswith("--")}
    told_above = {"--help", "--model", "--model-path", "--hisparse-config", "--context-length"}
    assert {name.partition(" ")[0] if name.startswith("--") else name for name in named} == (
        {probe.name for probe in PROBES} | (options - told_above)
    )
