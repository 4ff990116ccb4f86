"""The report of a bench: its numbers are those of the JSON, it loads nothing, and a JSON with holes is refused."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sglang_hisparse_plugin import provenance
from sglang_hisparse_plugin.cli import main
from sglang_hisparse_plugin.report import Engine, ReportError, data, page, read_engine

RECORD = Path(__file__).parents[2] / "docs" / "measurements" / "swap_in_h200.json"
RAW = json.loads(RECORD.read_text())
ROW = {
    "release": "0.5.12",
    "mode": "<speculative>",
    "kernel": "plugin",
    "concurrency": 8,
    "context": 32768,
    "tokens_per_s": 612.4,
    "ms_per_token": 13.06,
    "hit_rate": 0.92,
    "acceptance": None,
}


class Page(HTMLParser):
    """Tables by caption or number, with every cell's text; every attribute; whether tags are balanced."""

    VOID = ("meta", "br", "img", "path", "use", "rect", "link", "source")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "table":
            self.tables.append([])
            self.captions.append("")
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += text
        elif self.open and self.open[-1] == "caption":
            self.captions[-1] += text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report as the command writes it."""
    folder = tmp_path_factory.mktemp("report")
    engine = folder / "run.json"
    engine.write_text(json.dumps({"device": "NVIDIA H200", "rows": [ROW, {**ROW, "kernel": "sglang", "note": "slow"}]}))
    assert main(["bench", f"--from={RECORD}", f"--engine={engine}", f"--report={folder / 'out'}"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def html(folder: Path) -> str:
    return (folder / "index.html").read_text("utf-8")


def changed(change: Callable[[dict], object]) -> dict:
    raw = copy.deepcopy(RAW)
    change(raw)
    return raw


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
    """1 of 252 cells slower, by 0.1%, up to 7.2x, median 2.2x: as docs/swap_in.md says of the same record."""
    assert data.bench(RAW).summary() == {
        "cells": 252,
        "median": pytest.approx(2.2, abs=0.05),
        "least": pytest.approx(0.999, abs=0.0005),
        "greatest": pytest.approx(7.2, abs=0.05),
        "slower": 1,
        "over_bound": pytest.approx(1.03, abs=0.005),
    }
    assert "<dd>1</dd>" in html and "<dd>1.00x - 7.16x</dd>" in html


def test_who_measured_what(html: str) -> None:
    for fact in ("NVIDIA H200", "dfe247c", "2.11.0+cu130", "580.159.04", "sglang 0.5.12"):
        assert fact in html
    pictures = [value for tag, name, value in Page(html).attributes if (tag, name) == ("svg", "aria-label")]
    assert len(pictures) == 6 and all("byte rows, hot buffer 4096" in label for label in pictures)


def test_a_records_note_is_shown(html: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its cost of counting was measured must stand beside the figure."""
    assert "counting_cost_percent is of swap_in_counters_h200.json" in RAW["note"]
    assert f'<p class="soft">Note: {RAW["note"]}.</p>' in html
    assert main(["bench", f"--from={RECORD}"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Counters on cost +0.10%" in shown and f"note: {RAW['note']}" in shown
    assert "ote:" not in page.render(data.bench(changed(lambda raw: raw.pop("note"))), None)


@pytest.mark.parametrize(
    ("script", "module", "found"),
    [
        ("echo 580.65.06; echo 580.65.06", "", "580.65.06"),
        ("exit 9", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26", "570.124.06"),
        ("exit 9", None, None),
    ],
)
def test_the_driver_is_what_the_machine_tells(
    script: str, module: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    if module is not None:
        (tmp_path / "version").write_text(module)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(provenance, "DRIVER_FILE", tmp_path / "version")
    assert provenance.driver() == found


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
    assert bench.ratio((1, 0, 1152, 4096)) == pytest.approx(3.0 / 2.408)
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw["cells"].pop(7), "lacks 1 of 252 cells of its grid: batch 2, misses 32"),
        (lambda raw: raw["cells"].clear(), "has no cells"),
        (lambda raw: raw["cells"].append(raw["cells"][0]), "twice"),
        (lambda raw: raw["cells"][3].pop("us"), "cell 3 .*it lacks 'us'"),
        (lambda raw: raw["cells"][3]["us"].pop("sglang 0.5.12"), "cell 3 .*us has plugin"),
        (lambda raw: raw["cells"][3]["us"].update(plugin=0), "a time is not above 0"),
        (lambda raw: raw["cells"][3].update(batch="many"), "cell 3 "),
        (lambda raw: raw["cells"].__delitem__(slice(1, None)), "no cell of .* has a miss"),
        (lambda raw: raw["cells"][3]["spread"].update(plugin=1), "cell 3 .*spread is no pair"),
        (lambda raw: raw.update(copy_engine_gbps="x"), "is no number above 0"),
        (lambda raw: raw["scattered_gbps"].update({"656": "x"}), "is no number above 0"),
        (lambda raw: raw.pop("device"), "does not say device"),
        (lambda raw: raw["scattered_gbps"].pop("656"), "no scattered_gbps of rows of 656 bytes"),
    ],
)
def test_holes_are_named(change: Callable[[dict], object], said: str) -> None:
    with pytest.raises(ReportError, match=said):
        data.bench(changed(change))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "has no rows"),
        ('{"rows": [{"release": "0.5.12"}]}', "row 0 .* lacks mode, kernel, concurrency"),
        (json.dumps([{**ROW, "tokens_per_s": "fast"}]), "tokens_per_s is 'fast', which is no number"),
    ],
)
def test_a_wrong_engine_file(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ReportError, match=said):
        read_engine(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from=nowhere.json", "--report=out"], "cannot read nowhere.json"),
        ([f"--from={RECORD}", "--engine=x"], "name its folder with --report"),
        ([f"--from={RECORD}", "--quick"], "--from measures nothing"),
        (["--json=no/folder/x.json"], "cannot write to no/folder/x.json"),
        (["--json=.", f"--from={RECORD}"], "cannot write to .: Is a directory"),
        (["--report=out"], "no CUDA device"),
        ([f"--from={RECORD}", "--report=/dev/null/out"], "cannot write to /dev/null/out"),
        ([f"--from={RECORD}", "--engine=nowhere.json", "--report=out"], "cannot read nowhere.json"),
    ],
)
def test_wrong_use(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not list(tmp_path.iterdir())


def test_without_matplotlib(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", f"--from={RECORD}", f"--report={tmp_path / 'out'}"]) == 2
    assert "pip install 'sglang-hisparse-plugin[report]'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_as_wide_as_the_terminal_and_loses_no_number(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["bench", f"--from={RECORD}"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns and "\u2026" not in shown
    ours = [f"{cell['us']['plugin']:.1f}" for cell in RAW["cells"]]
    rows = [words for line in shown.splitlines() if len(words := line.split()) > 6 and words[0].isdigit()]
    assert sorted(row[2] for row in rows) == sorted(ours)
    assert bool(re.search(r"us +spread", shown)) == (columns == 120)


def test_json_is_printed_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", f"--from={RECORD}", "--json", f"--report={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == RAW and "Report: " in said.err
    assert main(["bench", f"--from={RECORD}", f"--json={tmp_path / 'again.json'}"]) == 0
    assert json.loads((tmp_path / "again.json").read_text()) == RAW
    capsys.readouterr()
    assert main(["bench", "--from=nowhere.json", "--json"]) == 2
    assert "cannot read nowhere.json" in json.loads(capsys.readouterr().out)["error"]


def test_a_run_on_a_gpu_is_reported_as_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the run only the device is not there: its times are those of the record."""
    import torch

    from sglang_hisparse_plugin.kernels import bench, build

    times = {tuple(cell[axis] for axis in data.AXES): cell for cell in RAW["cells"]}
    rates = {int(row): rate for row, rate in RAW["scattered_gbps"].items()}
    machine = {"device": "X", "torch": "1", "cuda": "2", "copy_engine_gbps": 55.2, "scattered_gbps": rates}

    def measured(cells, kernels, *, arena):
        for cell in cells:
            us = {name: times[cell]["us"]["plugin"] * (1 if name.startswith("plugin") else 2) for name in kernels}
            yield bench.Result(cell, us, dict(us), dict(us))

    stand_ins = {
        "plugin_kernel": lambda: None,
        "counting": lambda *_: None,
        "installed_kernel": lambda: {"sglang 1": None},
        "Arena": lambda *_: None,
        "describe_machine": lambda *_: machine,
        "measure": measured,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(bench, name, stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    file = tmp_path / "run.json"
    assert main(["bench", f"--report={tmp_path / 'live'}", f"--json={file}"]) == 0
    assert main(["bench", f"--from={file}", f"--report={tmp_path / 'again'}"]) == 0
    record = json.loads(file.read_text())
    assert record["sources"] == build.source_digest() and len(record["sources"]) == 12
    assert "commit" in record and record["commit"] == provenance.commit()
    live, again = ((tmp_path / name / "index.html").read_text() for name in ("live", "again"))
    assert live == again and live.count(">2.00</td>") == len(RAW["cells"])


def test_the_page_has_short_numbers_and_a_legend_for_every_line(html: str) -> None:
    shown = [cell for table in Page(html).tables for line in table for cell in line]
    assert not [cell for cell in shown if re.search(r"\.\d{5}", cell)]
    assert "43.75" in shown and "612.4" in shown
    for label in ("batch 1", "SGLang", "copy engine 43.8", "scattered rows 43.7", "bound"):
        assert f">{label}</text>" in html or f"{label}\n" in html, label
    sizes = {float(size) for size in re.findall(r"font-size: ([0-9.]+)px", html.partition("<svg")[2])}
    assert min(sizes) >= 10  # on a phone 310 of these are 360 points
