"""The page of a bench: its numbers are those of the JSON, and it loads nothing."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from pages import RAW, RECORD, ROW, Page, changed

from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.report import Engine, data, page


def test_all_is_there(folder: Path) -> None:
    pictures = ("heat.png", "gbps.png", "time.png")
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        [*pictures, "bench.json", "engine.json", "index.html"]
    )
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert json.loads((folder / "bench.json").read_text()) == RAW
    assert json.loads((folder / "engine.json").read_text())["rows"][0] == ROW


def test_it_loads_nothing_from_anywhere(html: str) -> None:
    loading = ("src", "srcset", "data", "action", "poster", "xlink:href", "href")
    found = Page(html)
    targets = {value for _, name, value in found.attributes if name in loading}
    local = {"bench.json", "heat.png", "gbps.png", "time.png"}
    assert {value for value in targets if not value.startswith("#")} == local
    assert {name for tag, name, value in found.attributes if value in local} == {"href"}
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _, _ in found.attributes}


def test_heat_maps_are_the_ratios_of_the_json(html: str) -> None:
    found = Page(html)
    tables = {caption: table for caption, table in zip(found.captions, found.tables, strict=True) if caption}
    assert len(tables) == 6
    seen = 0
    for cell in RAW["cells"]:
        table = tables[f"{cell['row_bytes']}-byte rows, hot buffer {cell['hot']}"]
        column = table[0].index(str(cell["batch"]))
        (row,) = (line for line in table[1:] if line[0] == str(cell["misses"]))
        ratio = min(us for name, us in cell["us"].items() if name.startswith("sglang")) / cell["us"]["plugin"]
        assert abs(float(row[column]) - ratio) <= 0.00501
        assert (float(row[column]) < 1) == (ratio < 1)
        seen += 1
    assert seen == 252


def test_the_table_of_every_cell_is_the_json(html: str) -> None:
    (table,) = (table for table in Page(html).tables if len(table) == 253)
    head, *rows = table
    for cell, row in zip(RAW["cells"], rows, strict=True):
        shown = dict(zip(head, row, strict=False))
        assert [shown[name] for name in ("batch", "misses", "row bytes", "hot buffer")] == [
            str(cell[key]) for key in ("batch", "misses", "row_bytes", "hot")
        ]
        assert {name: shown[f"{name}, us"] for name in cell["us"]} == {name: str(us) for name, us in cell["us"].items()}


def test_the_summary_is_worked_out_from_the_json(html: str) -> None:
    """None of 252 cells slower, 1.05x to 7.6x, median 2.2x: as docs/swap_in.md says of the same record."""
    assert data.bench(RAW).summary() == {
        "cells": 252,
        "median": pytest.approx(2.2, abs=0.05),
        "least": pytest.approx(1.046, abs=0.0005),
        "greatest": pytest.approx(7.6, abs=0.05),
        "slower": 0,
        "over_bound": pytest.approx(1.01, abs=0.005),
    }
    assert "<dd>0</dd>" in html and "<dd>1.05x - 7.61x</dd>" in html


def test_who_measured_what(html: str) -> None:
    for fact in ("NVIDIA H200", "b1daca2", "2.11.0+cu130", "580.159.04", "sglang 0.5.12"):
        assert fact in html
    pictures = [value for tag, name, value in Page(html).attributes if (tag, name) == ("svg", "aria-label")]
    assert len(pictures) == 6 and all("byte rows, hot buffer 4096" in label for label in pictures)


def test_a_records_note_is_shown(html: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its cost of counting was measured must stand beside the figure."""
    assert "counting_cost_percent is of swap_in_counters_h200.json" in RAW["note"]
    assert f'<p class="soft">Note: {RAW["note"]}.</p>' in html
    assert main(["bench", f"--from={RECORD}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Counters on cost +0.20%" in shown and f"note: {RAW['note']}" in shown
    assert "ote:" not in page.render(data.bench(changed(lambda raw: raw.pop("note"))), None)


@pytest.mark.parametrize(
    ("date", "shown"),
    [
        ("2026-11-30T02:57:20+00:00", "2026-11-30 02:57 UTC"),
        ("2026-11-30T02:57:20.123456Z", "2026-11-30 02:57 UTC"),
        ("2026-11-30T02:57:20+01:00", "2026-11-30 02:57+01:00"),
        ("yesterday", "yesterday"),
    ],
)
def test_dates_are_short(date: str, shown: str) -> None:
    text = page.render(data.bench({**RAW, "date": date}), None)
    assert text.count(shown) == 2 and ("T02:57" not in text)


def test_engine_rows_are_a_table(html: str) -> None:
    (table,) = (table for table in Page(html).tables if "tokens/s" in table[0])
    assert table[0][-1] == "note"
    assert table[1] == ["0.5.12", "<speculative>", "plugin", "8", "32768", "612.4", "13.06", "0.92", "-", "-"]


def test_without_an_sglang_the_bound_is_the_measure() -> None:
    alone = copy.deepcopy(RAW)
    for cell in alone["cells"]:
        for key in data.PER_KERNEL:
            cell[key] = {"plugin": cell[key]["plugin"]}
    bench = data.bench(alone)
    text = page.render(bench, None)
    assert bench.ratio((1, 0, 1152, 4096)) == pytest.approx(3.0 / 2.034)
    assert "time of the bound over" in text and "No SGLang was installed" in text and "End to end" not in text


def test_as_it_comes_from_a_run() -> None:
    """Row sizes are numbers before they have been JSON, and the kernel is timed with its counters on, too."""
    fresh = copy.deepcopy(RAW)
    fresh["scattered_gbps"] = {int(row): rate for row, rate in RAW["scattered_gbps"].items()}
    for cell in fresh["cells"]:
        for key in data.PER_KERNEL:
            cell[key]["plugin, counting"] = cell[key]["plugin"]
    bench = data.bench(fresh)
    assert bench.summary() == data.bench(RAW).summary()
    assert "plugin, counting, us" in page.render(bench, None)


def test_a_quick_run() -> None:
    few = [c for c in RAW["cells"] if c["batch"] in (1, 8, 64) and c["misses"] in (0, 128, 2048)]
    quick = {**RAW, "cells": [c for c in few if (c["row_bytes"], c["hot"]) == (656, 4096)]}
    assert len(Page(page.render(data.bench(quick), Engine([ROW], {}))).captions) == 4


def test_the_page_has_short_numbers_and_a_legend_for_every_line(html: str) -> None:
    shown = [cell for table in Page(html).tables for line in table for cell in line]
    assert not [cell for cell in shown if re.search(r"\.\d{5}", cell)]
    assert "54.63" in shown and "612.4" in shown
    for label in ("batch 1", "SGLang", "copy engine 54.6", "scattered rows 48.6", "bound"):
        assert f">{label}</text>" in html or f"{label}\n" in html, label
    sizes = {float(size) for size in re.findall(r"font-size: ([0-9.]+)px", html.partition("<svg")[2])}
    assert min(sizes) >= 10  # on a phone 310 of these are 360 points
