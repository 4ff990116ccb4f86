"""One table: four ways to serve, with each swap-in kernel, at several loads, on a model shaped like DeepSeek-V3.2.

    python table.py --json rows.json          # about eight minutes on an H200
    python table.py --device cpu              # a small model: shows that it runs, its times mean nothing

The model has the attention of DeepSeek-V3.2 (128 heads, latent 512 + 64, indexer 64 x 128, top-k 2048), four layers
and no MLP to speak of. It is the demo's: prompts have a known answer, and a wrong one is an error here, not a row.
Its rows are chosen without any locality, so its hit rates are as low as they can be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import client
from rich.console import Console

from sglang_hisparse_plugin import __version__, installation
from sglang_hisparse_plugin.cli import demo
from sglang_hisparse_plugin.demo import model, releases, setup
from sglang_hisparse_plugin.demo.model import Draft
from sglang_hisparse_plugin.demo.server import ServerFailed

V32 = model.Dims(
    heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_heads=64,
    index_topk=2048,
    q_lora_rank=1536,
    hidden=2048,
    layers=4,
)


@dataclass(frozen=True)
class Mode:
    """One way to serve."""

    name: str
    hisparse: bool
    draft: Draft | None
    kernel: str | None = None
    """Whose swap-in."""


MODES = (
    Mode("plain", hisparse=False, draft=None),
    Mode("hisparse", hisparse=True, draft=None, kernel="ours"),
    Mode("hisparse", hisparse=True, draft=None, kernel="upstream"),
    Mode("speculative", hisparse=False, draft=Draft.RIGHT),
    Mode("both", hisparse=True, draft=Draft.RIGHT, kernel="ours"),  # SGLang's kernels know no draft tokens
)


def scale(options: argparse.Namespace) -> setup.Scale:
    """Sizes that hold the largest load: a buffer per request on the device, all tokens on the host."""
    base = setup.SCALES[options.device].verifying(options.draft_tokens)
    most, longest = max(options.concurrency), max(options.context)
    buffers = most * (base.hot_buffer + 2 * 64)
    staged = (longest + options.steps) * most  # prompts of a burst are on the device until they are staged
    return replace(
        base,
        dims=V32 if options.device == "cuda" else base.dims,
        slots=most,
        device_tokens=(buffers + staged + 63) // 64 * 64,
        long=(longest,),
        crowd=(longest, longest),
        steps=options.steps,
    )


def measure(launcher: setup.Launcher, mode: Mode, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each load, from one server."""
    skip = "swap-in" if mode.kernel == "upstream" else ""
    name = f"{mode.name}-{mode.kernel}"
    server = launcher.server(name, hisparse=mode.hisparse, draft=mode.draft, skip=skip)
    server.command.append("--enable-metrics")
    with server:
        warm_up = [model.prompt(min(options.context), seed) for seed in range(2)]
        client.measure(f"http://127.0.0.1:{server.port}", mode.name, warm_up, options.steps)  # compiles what is left to
        for context in options.context:
            for concurrency in options.concurrency:
                launcher.progress(f"{name}: {concurrency} x {context}")
                prompts = [model.prompt(context, seed) for seed in range(concurrency)]
                row, streams = client.measure(f"http://127.0.0.1:{server.port}", mode.name, prompts, options.steps)
                for prompt, stream in zip(prompts, streams, strict=True):
                    if stream.tokens != model.walk(prompt, options.steps):
                        raise ServerFailed(f"{name}: a wrong token, {concurrency} x {context}")
                yield asdict(row) | {"kernel": mode.kernel, "release": launcher.target.name}


def where(device: str) -> dict[str, Any]:
    """The device and the commit of a row."""
    machine = demo.machine(device)
    return {"device": machine["hardware"], "commit": machine["commit"]}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(setup.SCALES), default="cuda")
    parser.add_argument("--release", help="whose wheel to fetch; default: the installed SGLang")
    parser.add_argument("--modes", nargs="+", choices=sorted({m.name for m in MODES}), default=[m.name for m in MODES])
    parser.add_argument("--kernels", nargs="+", choices=("ours", "upstream"), default=("ours", "upstream"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 4, 8), metavar="N")
    parser.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="default: 8192 32768; on a CPU 500")
    parser.add_argument("--steps", type=int, default=256, metavar="TOKENS", help="to generate for each request")
    parser.add_argument("--draft-tokens", type=int, choices=(2, 3, 4), default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too, after every server")
    options = parser.parse_args()
    options.context = options.context or ([8192, 32768] if options.device == "cuda" else [500])
    modes = [m for m in MODES if m.name in options.modes and (m.kernel or "ours") in options.kernels]
    root = releases.fetch(options.release) if options.release else installation.find(None).root
    target = setup.Target(installation.find(root).version, root)
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    failures = []
    with tempfile.TemporaryDirectory(prefix="sglang-hisparse-table-") as work:
        sizes = scale(options)
        console.print("writing the model")
        weights = model.write(Path(work) / "model", sizes.dims)
        variant = setup.Variant(draft_tokens=options.draft_tokens)
        launcher = setup.Launcher(target, sizes, weights, Path(work), console.print, variant)
        for mode in modes:
            try:
                for row in measure(launcher, mode, options):
                    rows.append(row | where(options.device))
            except (OSError, ServerFailed, ValueError) as error:
                failures.append(f"{mode.name}, kernel {mode.kernel or '-'}: {error}")
            if options.json:
                record = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "plugin": __version__}
                options.json.write_text(json.dumps(record | {"rows": rows, "failures": failures}, indent=1))
    client.show(rows)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
