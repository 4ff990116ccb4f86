"""The table, the page and the pictures say what the figures are of; what a record lacks is unknown, never left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import RAW, RECORD, Page, changed

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.report import data, origin, page, plots

KNOWN = {
    "plugin": "0.1.0",
    "commit": "4b97603a1c0ffee4b97603a1c0ffee4b97603a1c",
    "sources": "2eb4d0a45faf",
    "date": "2026-11-30T02:57:20+00:00",
    "device": "NVIDIA H200",
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
}
SENTENCE = (
    "Measured with plugin 0.1.0, commit 4b97603a1, kernel sources 2eb4d0a45faf, date 2026-11-30 02:57 UTC, "
    "device NVIDIA H200, driver 580.159.04, torch 2.11.0+cu130, CUDA 13.0"
)
NOTHING = (
    "Measured with plugin unknown, commit unknown, kernel sources unknown, date unknown, device unknown, "
    "driver unknown, torch unknown, CUDA unknown"
)


def table(raw: dict, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (folder / "run.json").write_text(json.dumps(raw))
    assert main(["bench", f"--from={folder / 'run.json'}"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(KNOWN), SENTENCE),
        (lambda raw: raw.update(dict.fromkeys(KNOWN)), NOTHING),
        (lambda raw: raw.update(dict.fromkeys(KNOWN, " ")), NOTHING),
        (lambda raw: [raw.pop(key, None) for key in KNOWN if key != "device"] + [raw.update(device={})], NOTHING),
        (lambda raw: raw.update({**KNOWN, "commit": None}), SENTENCE.replace("commit 4b97603a1", "commit unknown")),
    ],
    ids=["all", "null", "blank", "absent", "a wheel's"],
)
def test_table_and_page_say_all_of_it(
    change: Callable[[dict], object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = changed(change)
    assert said in table(raw, tmp_path, capsys)
    html = page.render(data.bench(raw), None)
    assert said in html
    facts = dict(line for line in Page(html).tables[-1] if line)
    assert {key: facts[label] for key, label in origin.LABELS.items()} == origin.facts(raw)


def test_a_record_without_a_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As this project's was for a while."""
    raw = {key: value for key, value in {**RAW, **KNOWN}.items() if key != "date"}
    assert "kernel sources 2eb4d0a45faf, date unknown" in table(raw, tmp_path, capsys)
    assert main(["bench", f"--from={RECORD}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RAW  # nothing is made up in what machines read


@pytest.mark.parametrize(("commit", "shown"), [(KNOWN["commit"], "4b97603a1"), (None, "unknown")])
def test_pictures_name_commit_and_sources(commit: str | None, shown: str) -> None:
    bench = data.bench({**RAW, **KNOWN, "commit": commit})
    for figure in (plots.heat(bench), plots.panels(bench, plots.rates, "GB/s")):
        title = " ".join(figure.get_suptitle().split())
        assert f"NVIDIA H200, commit {shown}, kernel sources 2eb4d0a45faf" in title


@pytest.mark.parametrize("written", ["4b97603", "4b97603-dirty", "v0.1.0 and what was not committed"])
def test_only_a_whole_commit_is_shortened(written: str) -> None:
    assert f"commit {written}, " in origin.sentence({**KNOWN, "commit": written})
    assert "commit 4b97603a1-dirty, " in origin.sentence({**KNOWN, "commit": f"{KNOWN['commit']}-dirty"})


def test_a_title_is_no_wider_than_its_picture() -> None:
    """A quick run has one panel, a third as wide as the whole grid's."""
    cells = [cell for cell in RAW["cells"] if (cell["row_bytes"], cell["hot"]) == (656, 4096)]
    bench = data.bench({**RAW, **KNOWN, "cells": cells})
    for figure in (plots.heat(bench), plots.panels(bench, plots.rates, "GB/s")):
        figure.draw_without_rendering()
        title = figure._suptitle.get_window_extent()
        assert title.x0 >= 0 and title.x1 <= figure.bbox.width and title.y1 <= figure.bbox.height
