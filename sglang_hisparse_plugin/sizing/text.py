"""A report of ``size`` as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .. import lines
from .amounts import GIB


def show(report: dict[str, Any]) -> None:
    """Print it, no wider than the terminal."""
    console = Console(highlight=False, width=lines.width())
    for paragraph in _head(report):
        print(lines.fill(paragraph))
    console.print(_fit(report))
    print("\nFlags, besides --model-path:")
    print("\n".join(lines.command(report["flags"])))
    _swap_in(console, report["swap_in"])
    contexts = Table("prompt", "with HiSparse", "without", title="Requests at once", title_justify="left", box=None)
    for row in report["contexts"]:
        contexts.add_row(*(str(row[key]) for key in ("prompt", "hisparse", "without")))
    console.print("", contexts)
    hot = ", ".join(f"{row['device_buffer_size']}: {row['requests']}" for row in report["hot_buffers"])
    print(f"\n{lines.fill(f'By device_buffer_size: {hot}')}")
    for note in report["notes"]:
        print(lines.fill(f"note: {note}", "  "))


def _head(report: dict[str, Any]) -> list[str]:
    model, machine, token = report["model"], report["machine"], report["per_token"]
    drafts = f", {report['draft_tokens']} draft tokens" if report["draft_tokens"] else ""
    return [
        f"{model['name']}, {model['layers']} layers, {report['kv_dtype']} KV, SGLang {report['release']}, prompts of "
        f"{report['prompt']} and answers of {report['output']} tokens{drafts}",
        f"Per GPU: {_gib(machine['device_budget'])} for KV, of {_gib(machine['gpu'])}: weights take "
        f"{_gib(machine['weights'])}, and {_gib(machine['reserve'])} are kept for activations and CUDA graphs "
        f"({machine['reserve_origin']}). Per rank: {_gib(machine['host_budget'])} of host memory "
        f"({machine['ranks_per_node']} ranks on a node).",
        f"A token takes {token['row']} B a layer on the host ({token['host']} B in all) and keeps "
        f"{token['index_key']} B a layer of index key on the device ({token['device_index']} B in all); a request's "
        f"tables take {token['request_tables'] / 1e6:.2f} MB.",
    ]


def _fit(report: dict[str, Any]) -> Table:
    fit, plain = report["hisparse"], report["without"]
    table = Table(box=None, pad_edge=False)
    for column in ("", "with HiSparse", "without"):
        table.add_column(column, no_wrap=not column)
    table.add_row("[bold]requests at once[/]", f"[bold]{fit['requests']}[/]", str(plain["requests"] if plain else 0))
    table.add_row("  on one rank", str(fit["requests_per_rank"]), str(plain["requests_per_rank"] if plain else 0))
    table.add_row("device slots of a rank", str(fit["device_tokens"]), str(plain["device_tokens"] if plain else 0))
    table.add_row("device memory of a rank", _gib(fit["device_bytes"]), _gib(plain["device_bytes"] if plain else 0))
    for name, size in fit["device_parts"].items():
        table.add_row(f"  {name}", _gib(size), "")
    table.add_row("host memory of a rank", _gib(fit["host_bytes"]), "")
    table.add_row("  of it pinned", _gib(fit["pinned_bytes"]), "")
    table.add_row("limited by", fit["limit"], plain["limit"] if plain else "one request does not fit")
    return table


def _swap_in(console: Console, swap: dict[str, Any]) -> None:
    columns = ["hit rate", "misses", "plugin, ms", f"{swap['sglang_kernel']}, ms", "GB moved"]
    shared = any(row["shared_ms"] for row in swap["rows"])
    title = (
        f"Swap-in per decode step of {swap['batch']} requests, {swap['calls']} calls "
        f"({swap['device']}, commit {swap['commit']})"
    )
    table = Table(*columns, title=title, title_justify="left", box=None)
    if shared:
        table.add_column("copied beside, ms")
    for row in swap["rows"]:
        cells = [f"{row['hit_rate']:.0%}", f"{row['misses']:.0f}", f"{row['plugin_ms']:.2f}", f"{row['sglang_ms']:.2f}"]
        table.add_row(*cells, f"{row['bytes'] / 1e9:.3f}", *([f"{row['shared_ms']:.2f}"] if shared else []))
    console.print("", table)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
