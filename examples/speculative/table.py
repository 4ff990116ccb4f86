"""One table: four ways to serve, with each swap-in kernel, at several loads, on a model shaped like DeepSeek-V3.2.

    python table.py --json rows.json          # at most eight minutes on an H200
    python table.py --device cpu              # a small model: shows that it runs, its times mean nothing

The model has the attention of DeepSeek-V3.2 (128 heads, latent 512 + 64, indexer 64 x 128, top-k 2048), a few layers
and no MLP to speak of. It is the demo's: prompts have a known answer, and a wrong one is an error here, not a row.
Its rows are chosen without any locality, so its hit rates are as low as they can be.

All servers start together and then take turns, load by load, the small ones first, so that what drifts drifts for all.
Each turn adds a sample to every row; when the time is up, what there is stands in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import client
from rich.console import Console
from table_record import MODES, Cell, Load, Mode, Record

from sglang_hisparse_plugin import installation
from sglang_hisparse_plugin.demo import language, model, releases, scales, setup
from sglang_hisparse_plugin.demo.server import Server, ServerFailed, stop_all
from sglang_hisparse_plugin.demo.sizes import Dims

V32 = Dims(
    heads=128,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    v_head_dim=128,
    index_heads=64,
    index_topk=2048,
    q_lora_rank=1536,
    hidden=2048,
)
#: One piece of an answer for so many tokens: sending each by itself would take longer than four layers do.
STREAM_INTERVAL = 8
CPU_RELEASE = "0.5.12"  #: fetched where none is installed


class Seat:
    """A server that takes its turns. How often the buffer hit is asked before the next turn: metrics come late."""

    def __init__(self, mode: Mode, server: Server, options: argparse.Namespace) -> None:
        self.mode, self.options = mode, options
        self.url = f"http://127.0.0.1:{server.port}"
        self.cells: dict[Load, Cell] = {}
        self._open: tuple[Cell, dict[str, float], float] | None = None

    def warm_up(self) -> None:
        """What is compiled at its first use is compiled now."""
        client.send(self.url, [language.prompt(min(self.options.context), seed) for seed in range(2)], 64)

    def turn(self, load: Load) -> None:
        """Add a sample.

        Raises:
            OSError, ValueError: the server did not answer, or too soon to be measured.
            ServerFailed: a token was wrong.
        """
        self.close()
        requests, context = load
        prompts = [language.prompt(context, seed) for seed in range(requests)]
        steps = steps_for(load, self.options)
        before = client.swap_in_counts(self.url) if self.mode.hisparse else {}
        streams = client.send(self.url, prompts, steps, self.options.patience)
        for prompt, stream in zip(prompts, streams, strict=True):
            if stream.tokens != language.walk(prompt, steps):
                raise ServerFailed("a wrong token")
        rate, accepted = client.rate(streams), client.acceptance(streams)
        cell = self.cells.setdefault(load, Cell())
        cell.tokens_per_s.append(rate)
        cell.acceptance += [] if accepted is None else [accepted]
        self._open = (cell, before, time.monotonic()) if before else None

    def close(self) -> None:
        """Ask how the last turn hit, once the metrics must know."""
        if self._open is None:
            return
        (cell, before, ended), self._open = self._open, None
        time.sleep(max(0.0, ended + client.METRICS_INTERVAL - time.monotonic()))
        hits = client.hit_rate(before, client.swap_in_counts(self.url))
        cell.hit_rate += [] if hits is None else [hits]


def steps_for(load: Load, options: argparse.Namespace) -> int:
    """More for large loads, or the first request would end before the last has been read."""
    requests, context = load
    return int(options.steps) * max(1, requests * context // 65536)


def scale(options: argparse.Namespace) -> scales.Scale:
    """Sizes that hold the largest load: a buffer per request on the device, all tokens on the host."""
    base = scales.SCALES[options.device].verifying(options.draft_tokens)
    most, longest = max(options.concurrency), max(options.context)
    steps = steps_for((most, longest), options)
    buffers = most * (base.hot_buffer + 2 * 64)
    staged = (longest + steps) * most  # prompts of a burst are on the device until they are staged
    return replace(
        base,
        dims=replace(V32 if options.device == "cuda" else base.dims, layers=options.layers),
        slots=most + 1,  # the last chunk of a prompt counts as another request, and who is full admits nobody for long
        device_tokens=(buffers + staged + 63) // 64 * 64,
        long=(longest,),
        crowd=(longest, longest),
        steps=steps,
        patience=min(base.patience, 30 * options.minutes),
    )


def loads(options: argparse.Namespace) -> list[Load]:
    """The small ones first."""
    return sorted(itertools.product(options.concurrency, options.context), key=lambda load: load[0] * load[1])


@contextlib.contextmanager
def started(
    launcher: setup.Launcher, modes: list[Mode], options: argparse.Namespace, record: Record, say: Console
) -> Iterator[list[Seat]]:
    """Start all servers and warm them up; a failure is recorded, and the others go on."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:

        def one(mode: Mode) -> Seat | None:
            skip = "swap-in" if mode.kernel == "upstream" else ""
            server = launcher.server(mode.label, hisparse=mode.hisparse, draft=mode.draft, skip=skip)
            server.command += ["--enable-metrics", f"--stream-interval={STREAM_INTERVAL}"]
            try:
                seat = Seat(mode, stack.enter_context(server), options)
                seat.warm_up()
                say.print(f"{mode.label} is ready after {time.monotonic() - begun:.0f} s")
                return seat
            except (OSError, ServerFailed) as error:
                record.failures.append(f"{mode.label} did not start: {error}")
                return None

        with ThreadPoolExecutor(options.starts or len(modes)) as pool:
            seats = list(pool.map(one, modes))
        yield [seat for seat in seats if seat]


def take_turns(record: Record, options: argparse.Namespace, deadline: float, say: Console) -> None:
    """Sample every load on every server, `repeats` times or until the time is up."""
    turns = itertools.product(range(options.repeats), loads(options), record.seats)
    failed: set[tuple[Seat, Load]] = set()
    for number, load, seat in turns:
        if (seat, load) in failed:
            continue
        where = f"{seat.mode.label}, {load[0]} x {load[1]}"
        if time.monotonic() > deadline:
            record.failures.append(f"stopped when the {options.minutes:g} minutes were over, before {where}")
            break
        try:
            seat.turn(load)
            say.print(f"{number + 1}/{options.repeats} {where}: {seat.cells[load].tokens_per_s[-1]:.0f} tokens/s")
        except (OSError, ServerFailed, ValueError) as error:
            failed.add((seat, load))
            record.failures.append(f"{where}: {error}")
        record.write()
    for seat in record.seats:
        seat.close()
    record.write()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(scales.SCALES), default="cuda")
    parser.add_argument("--release", help="whose wheel to fetch; default: the installed SGLang")
    parser.add_argument("--modes", nargs="+", choices=sorted({m.name for m in MODES}), default=[m.name for m in MODES])
    parser.add_argument("--kernels", nargs="+", choices=("ours", "upstream"), default=("ours", "upstream"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=(1, 4, 8), metavar="N")
    parser.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="default: 8192 32768; on a CPU 500")
    parser.add_argument("--steps", type=int, default=512, metavar="TOKENS", help="to generate, at least")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the model, at least 2")
    parser.add_argument("--draft-tokens", type=int, choices=(2, 3, 4), default=3, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="samples of each row")
    parser.add_argument("--minutes", type=float, default=8, metavar="N", help="begin no turn after so long")
    parser.add_argument("--patience", type=float, default=120, metavar="S", help="for a server that says nothing")
    parser.add_argument("--starts", type=int, metavar="N", help="servers that start at a time; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too, after every turn")
    parser.add_argument("--commit", help="for the record, where this is no checkout")
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers: the model finds its way in two layers, so it has at least 2")
    options.context = options.context or ([8192, 32768] if options.device == "cuda" else [500])
    return options


def source(options: argparse.Namespace) -> Path:
    """The folder of the SGLang to serve with: the release asked for, or the installed; on a CPU one that is fetched."""
    try:
        return releases.fetch(options.release) if options.release else installation.find().root
    except releases.ReleaseUnavailable as error:
        raise SystemExit(f"table.py: {error}") from error
    except installation.NotInstalled:
        if options.device == "cpu":
            return releases.fetch(CPU_RELEASE)
        raise SystemExit("table.py: SGLang is not installed here; install it, or have --release fetch one") from None


def main() -> int:
    """Exit code 0: every row was measured as often as asked."""
    options = arguments()
    deadline = time.monotonic() + 60 * options.minutes
    modes = [m for m in MODES if m.name in options.modes and (m.kernel or "ours") in options.kernels]
    root = source(options)
    target = setup.Target(installation.find(root).version, root)
    say = Console(stderr=True, highlight=False)
    record = Record(options, target.name)
    with tempfile.TemporaryDirectory(prefix="sglang-hisparse-table-") as work:
        sizes = scale(options)
        say.print("writing the model")
        weights = model.write(Path(work) / "model", sizes.dims)
        variant = setup.Variant(draft_tokens=options.draft_tokens)
        launcher = setup.Launcher(target, sizes, weights, Path(work), lambda text: None, variant)
        say.print(f"starting {len(modes)} servers")
        with started(launcher, modes, options, record, say) as record.seats:
            record.write()
            take_turns(record, options, deadline, say)
    record.show()
    return 1 if record.failures else 0


def _interrupted(*_: Any) -> None:
    stop_all()
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main())
