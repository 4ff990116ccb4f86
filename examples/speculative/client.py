"""Tokens per second, acceptance length and hit rate of running SGLang servers, side by side.

    python client.py plain=http://127.0.0.1:30000
    python client.py hisparse=http://127.0.0.1:30000 --rows rows.json     # remembers; prints what it remembers, too

Prompts are random token ids, so any model will do; `table.py` sends prompts whose answer is known.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PATIENCE = 600  #: seconds a request may take
METRICS_INTERVAL = 5.5  #: seconds after which the plugin's counters in /metrics have been read anew
COUNTERS = re.compile(r"^sglang:hisparse_swap_in_(hits|misses)_total(?:\{.*\})? (\S+)$", re.M)


@dataclass
class Row:
    """What one server did with one load."""

    mode: str
    concurrency: int
    context: int
    """Tokens of each prompt."""
    tokens_per_s: float
    """Of all requests, while all of them decode."""
    ms_per_token: float
    """Of each request, then."""
    acceptance: float | None
    """Tokens per verification; None without speculative decoding."""
    hit_rate: float | None
    """Selected rows that the hot buffer held; None where the server has no such metric."""


@dataclass
class Stream:
    """What came of one request."""

    tokens: list[int]
    arrivals: list[tuple[float, int]]
    """(seconds, tokens so far), one for each piece of the answer."""
    verifications: int


def measure(url: str, mode: str, prompts: list[list[int]], steps: int) -> tuple[Row, list[Stream]]:
    """Send all prompts at once, each for `steps` tokens.

    Raises:
        OSError: the server cannot be reached, or refuses.
        ValueError: `steps` is so short that the first request ends before the last one has begun to decode.
    """
    before = swap_in_counts(url)
    streams = send(url, prompts, steps)
    each = rate(streams)
    if before:
        time.sleep(METRICS_INTERVAL)
    hits = hit_rate(before, swap_in_counts(url))
    row = Row(mode, len(prompts), len(prompts[0]), each, 1000 * len(prompts) / each, acceptance(streams), hits)
    return row, streams


def send(url: str, prompts: list[list[int]], steps: int, patience: float = PATIENCE) -> list[Stream]:
    """Send all prompts at once, each for `steps` tokens; `patience`: seconds without an answer.

    Raises:
        OSError: the server cannot be reached, refuses, or is silent for too long.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: _stream(url, prompt, steps, patience), prompts))


def rate(streams: list[Stream]) -> float:
    """Tokens per second of all requests, while all of them decode.

    Raises:
        ValueError: they never do, or for too short a time to tell.
    """
    begin = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    total = 0.0
    for stream in streams:
        inside = [(when, count) for when, count in stream.arrivals if begin <= when <= end]
        if len(inside) < 2 or inside[0][0] == inside[-1][0]:
            start = min(stream.arrivals[0][0] for stream in streams)
            raise ValueError(
                f"too few tokens for {len(streams)} requests to decode at the same time: ask for more. Seconds of each "
                + ", ".join(f"{s.arrivals[0][0] - start:.1f}-{s.arrivals[-1][0] - start:.1f}" for s in streams)
            )
        total += (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
    return total


def acceptance(streams: list[Stream]) -> float | None:
    """Tokens per verification; None without speculative decoding."""
    verifications = sum(stream.verifications for stream in streams)
    return sum(len(stream.tokens) - 1 for stream in streams) / verifications if verifications else None


def show(rows: list[dict[str, Any]], console: Console | None = None) -> None:
    """Print rows side by side, within 80 columns."""
    names = ("mode", "kernel", "requests", "context", "tokens\nper s", "ms per\ntoken", "acceptance", "hit\nrate")
    table = Table(*names, box=None, pad_edge=False, padding=(0, 1))
    for row in rows:
        numbers = [f"{row[name]:.1f}" for name in ("tokens_per_s", "ms_per_token")]
        acceptance = "-" if row["acceptance"] is None else f"{row['acceptance']:.2f}"
        hit_rate = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.0%}"
        sizes = str(row["concurrency"]), str(row["context"])
        table.add_row(row["mode"], row.get("kernel") or "-", *sizes, *numbers, acceptance, hit_rate)
    (console or Console()).print(table)


def _stream(url: str, prompt: list[int], steps: int, patience: float) -> Stream:
    sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    arrivals: list[tuple[float, int]] = []
    tokens: list[int] = []
    piece: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=patience) as answer:
        for line in answer:
            text = line.decode().removeprefix("data:").strip()
            if not text or text == "[DONE]":
                continue
            piece = json.loads(text)
            if "error" in piece:
                raise OSError(f"{url}: {piece['error']}")
            tokens = _grown(tokens, piece["output_ids"], piece["meta_info"]["completion_tokens"])
            arrivals.append((time.monotonic(), len(tokens)))
    if len(tokens) < steps:
        raise OSError(f"{url}: the answer ended after {len(tokens)} of {steps} tokens; the server's log says why")
    return Stream(tokens, arrivals, int(piece["meta_info"].get("spec_verify_ct", 0)))


def _grown(tokens: list[int], new: list[int], total: int) -> list[int]:
    """Pieces hold all tokens so far, or only those that are new, as the release and its flags will have it."""
    return new if len(new) == total else tokens + new


def swap_in_counts(url: str) -> dict[str, float]:
    """Hits and misses until at most METRICS_INTERVAL ago; empty where the server does not tell."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for name, value in COUNTERS.findall(text):
        found[name] = found.get(name, 0) + float(value)
    return found


def hit_rate(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Selected rows that the hot buffer held, between two readings; None if nothing was counted."""
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    selected = sum(grown.values())
    return grown["hits"] / selected if selected else None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], metavar="N", help="requests at once")
    parser.add_argument("--context", type=int, default=8000, metavar="TOKENS", help="length of each prompt")
    parser.add_argument("--steps", type=int, default=256, metavar="TOKENS", help="to generate for each request")
    parser.add_argument("--vocabulary", type=int, nargs=2, default=(100, 3000), metavar=("FROM", "TO"))
    parser.add_argument("--rows", type=Path, help="a JSON file to which the rows are added")
    options = parser.parse_args()
    rng = random.Random(0)
    rows = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else []
    for server in options.servers:
        mode, _, url = server.partition("=")
        for concurrency in options.concurrency:
            prompts = [[rng.randrange(*options.vocabulary) for _ in range(options.context)] for _ in range(concurrency)]
            try:
                row, _ = measure(url.rstrip("/"), mode, prompts, options.steps)
            except (OSError, ValueError) as error:
                parser.exit(1, f"{parser.prog}: {mode}: {error}\n")
            rows.append(asdict(row))
            if options.rows:
                options.rows.write_text(json.dumps(rows, indent=1))
    show(rows)


if __name__ == "__main__":
    main()
