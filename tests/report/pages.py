"""A record, a row of an engine's run, and a page taken apart."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

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


def changed(change: Callable[[dict], object]) -> dict:
    raw = copy.deepcopy(RAW)
    change(raw)
    return raw
