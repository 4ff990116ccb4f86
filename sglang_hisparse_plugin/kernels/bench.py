"""Times swap-in kernels on a grid of batch, misses, row size and hot buffer, against what the link allows.

A timed run is one CUDA graph of decode steps. In every step every request misses exactly `misses` of its top-k. The
tables are put back before each replay, outside the timed region, and the results are checked afterwards. A replay is
timed after another of the same kernel and that reset: L2 then holds what this kernel leaves, of the page tables of
host memory above all, and not what another left.
"""

from __future__ import annotations

import importlib
import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import provenance
from . import build
from . import swap_in as op

TOP_K, CONTEXT, PAGE = 2048, 32768, 64
STEPS = 16  # calls in a graph
PLAN_US, ROUND_TRIP_US = 3.0, 2.0  # the budget: plan, and one read of host memory if anything misses

SwapIn = Callable[..., Any]


class Cell(NamedTuple):
    """One point of the grid."""

    batch: int
    misses: int  # of one request in one step
    row_bytes: int
    hot: int

    @property
    def bytes(self) -> int:
        return self.batch * self.misses * self.row_bytes


BATCHES, MISSES, ROWS, HOTS = (1, 2, 4, 8, 16, 32, 64), (0, 32, 128, 410, 1024, 2048), (576, 656, 1152), (4096, 6144)


def grid(quick: bool = False) -> list[Cell]:
    """All cells; `quick`: a corner of each region."""
    if quick:
        return [Cell(batch, misses, 656, 4096) for batch in (1, 8, 64) for misses in (0, 128, 2048)]
    return [Cell(b, m, r, h) for h in HOTS for r in ROWS for b in BATCHES for m in MISSES]


@dataclass
class Result:
    """Microseconds per call by kernel: median, and the lowest and highest of the replays."""

    cell: Cell
    median: dict[str, float] = field(default_factory=dict)
    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)

    def bound(self, ceiling_gbps: float) -> float:
        """What the budget allows, in microseconds."""
        copies = ROUND_TRIP_US + self.cell.bytes / ceiling_gbps / 1e3 if self.cell.misses else 0.0
        return PLAN_US + copies

    def gbps(self, kernel: str) -> float:
        return self.cell.bytes / self.median[kernel] / 1e3


class Arena:
    """Host and device memory for the largest cell, shared by all; when it is there, the clocks are up."""

    def __init__(self, cells: Sequence[Cell], device: torch.device) -> None:
        self.device = device
        self.batch = max(cell.batch for cell in cells)
        row, hot = max(cell.row_bytes for cell in cells), max(cell.hot for cell in cells)
        generator = torch.Generator(device).manual_seed(1)
        self.host = torch.empty(self.batch * CONTEXT * row, dtype=torch.uint8, pin_memory=True)
        for part in self.host.split(1 << 30):
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=device, generator=generator))
        self.cache = torch.empty(self.batch * (hot + PAGE) * row, dtype=torch.uint8, device=device)
        rows = torch.randperm(self.batch * CONTEXT, device=device, generator=generator)
        self.host_locs = rows.view(self.batch, CONTEXT)
        shuffled = torch.rand(self.batch, CONTEXT - 1, device=device, generator=generator).argsort(1)
        self.tokens = shuffled.int()  # each request's tokens but the newest, in random order
        self.generator = generator
        _wake(device)


class Scene:
    """The tables of one cell, and the selections of its steps."""

    def __init__(self, arena: Arena, cell: Cell) -> None:
        batch, misses, hot = cell.batch, cell.misses, cell.hot
        width, device, generator = hot + PAGE, arena.device, arena.generator
        self.cell = cell
        self.host = arena.host[: arena.batch * CONTEXT * cell.row_bytes].view(-1, cell.row_bytes)
        self.cache = arena.cache[: batch * width * cell.row_bytes].view(-1, cell.row_bytes)
        self.host_locs = arena.host_locs[:batch]
        self.locs = torch.randperm(batch * width, device=device, generator=generator).int().view(batch, width)
        self.lru_before = torch.rand(batch, hot, device=device, generator=generator).argsort(1).short()
        self.tokens_before = torch.full((batch, width), -1, dtype=torch.int32, device=device)
        self.tokens_before[:, :hot] = arena.tokens[:batch, :hot]
        self.lru, self.tokens = self.lru_before.clone(), self.tokens_before.clone()
        self.out = torch.empty(batch, TOP_K, dtype=torch.int32, device=device)
        self.requests = torch.arange(batch, device=device)
        self.seq_lens = torch.full((batch,), CONTEXT, dtype=torch.int32, device=device)
        self.real = torch.tensor([batch], dtype=torch.int32, device=device)
        # The same tokens hit in every step; the others come in turn from outside the buffer.
        kept, outside = arena.tokens[:batch, : TOP_K - misses], arena.tokens[:batch, hot:]
        self.selected = []
        for step in range(STEPS):
            fresh = (torch.arange(misses, device=device) + step * misses) % outside.size(1)
            chosen = torch.cat([kept, outside[:, fresh]], dim=1)
            order = torch.rand(batch, TOP_K, device=device, generator=generator).argsort(1)
            self.selected.append(chosen.gather(1, order).contiguous())
        self.load_buffer()

    def reset(self) -> None:
        self.lru.copy_(self.lru_before)
        self.tokens.copy_(self.tokens_before)

    def load_buffer(self) -> None:
        """Put the rows into the cache that the tables say are there."""
        hot = self.cell.hot
        op.copy_planned(
            miss_src=self.host_locs.gather(1, self.tokens_before[:, :hot].long()),
            miss_dst=self.locs[:, :hot],
            miss_count=torch.full_like(self.requests, hot, dtype=torch.int32),
            num_real_reqs=None,
            host_cache=self.host,
            device_buffer=self.cache,
            item_size_bytes=self.cell.row_bytes,
        )

    def call(self, kernel: SwapIn, step: int) -> None:
        kernel(
            top_k_tokens=self.selected[step],
            device_buffer_tokens=self.tokens,
            host_cache_locs=self.host_locs,
            device_buffer_locs=self.locs,
            host_cache=self.host,
            device_buffer=self.cache,
            top_k_device_locs=self.out,
            req_pool_indices=self.requests,
            seq_lens=self.seq_lens,
            lru_slots=self.lru,
            item_size_bytes=self.cell.row_bytes,
            num_top_k=TOP_K,
            hot_buffer_size=self.cell.hot,
            num_real_reqs=self.real,
        )

    def steps(self, kernel: SwapIn) -> Callable[[], None]:
        """One call after the other, as a decode does."""

        def run() -> None:
            for step in range(STEPS):
                self.call(kernel, step)

        return run

    def verify(self, name: str) -> None:
        """After the last step each selected token's row is where the kernel says, and the LRU order is whole."""
        src = self.host_locs.gather(1, self.selected[-1].long()).flatten()
        sample = torch.randperm(src.numel(), device=src.device)[:4000]
        found = self.cache[self.out.flatten()[sample].long()]
        if not torch.equal(found.cpu(), self.host[src[sample].cpu()]):
            raise RuntimeError(f"{name} returned wrong rows in {self.cell}: its times mean nothing")
        held = torch.sort(self.lru.int(), 1).values
        if not torch.equal(held, torch.arange(self.cell.hot, device=held.device, dtype=torch.int32).expand_as(held)):
            raise RuntimeError(f"{name} left an LRU order that is no permutation in {self.cell}")


def plugin_kernel() -> SwapIn:
    """Ours, which must be the compiled one.

    Raises:
        build.CompilerMissing: it cannot be compiled here.
    """
    if build.find_nvcc() is None:
        raise build.CompilerMissing("no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME")
    build.loader()
    return op.swap_in


def counting(kernel: SwapIn, device: torch.device) -> SwapIn:
    """The same kernel with its counters on."""
    counters = torch.zeros(op.COUNTERS, dtype=torch.int64, device=device)
    return lambda **call: kernel(counters=counters, **call)


def counting_cost_percent(results: Sequence[Result], plain: str, counting: str) -> dict[str, float]:
    """What counting adds to calls that miss and to calls that do not, in percent: medians over the cells."""
    costs: dict[str, list[float]] = {}
    for result in results:
        kind = "calls that miss" if result.cell.misses else "calls that miss nothing"
        costs.setdefault(kind, []).append(100 * (result.median[counting] / result.median[plain] - 1))
    return {kind: round(statistics.median(percent), 2) for kind, percent in costs.items()}


def installed_kernel() -> dict[str, SwapIn]:
    """The installed SGLang's own kernel, called as its coordinator calls it; empty where there is none."""
    try:
        coordinator = importlib.import_module("sglang.srt.managers.hisparse_coordinator")
        version = importlib.import_module("sglang.version").__version__
    except ImportError:
        return {}
    parameters = inspect.signature(coordinator.HiSparseCoordinator.__init__).parameters
    chosen = parameters.get("swap_in_block_size")
    threads = 1024 if chosen is None else chosen.default  # a constant in the coordinator to 0.5.14
    original = inspect.unwrap(coordinator.load_cache_to_device_buffer_mla)
    return {f"sglang {version}": lambda **call: original(block_size=threads, **call)}


def describe_machine(arena: Arena, rows: Sequence[int]) -> dict[str, Any]:
    """Device, versions, method and what the link gives, for the record; `measure_link_again` completes it."""
    before = {row: scattered_ceiling(arena, row) for row in rows}
    return {
        "device": torch.cuda.get_device_name(arena.device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": provenance.driver(),
        "timed_after": "a replay of the same kernel",
        "copy_engine_gbps": copy_engine_gbps(arena),
        "scattered_gbps": _strictest([before]),
        "scattered_gbps_runs": {"before": before},
    }


def measure_link_again(arena: Arena, machine: dict[str, Any]) -> dict[str, Any]:
    """`machine` with the ceiling as it is after the grid, too: the link drifts, and the bound is of the larger."""
    before = machine["scattered_gbps_runs"]["before"]
    runs = {"before": before, "after": {row: scattered_ceiling(arena, row) for row in before}}
    return {**machine, "scattered_gbps": _strictest(list(runs.values())), "scattered_gbps_runs": runs}


def _strictest(runs: Sequence[dict[int, dict[int, float]]]) -> dict[int, float]:
    """The largest rate by row size, of every run and number of thread blocks."""
    return {row: max(rate for run in runs for rate in run[row].values()) for row in runs[0]}


def as_row(result: Result, machine: dict[str, Any]) -> dict[str, Any]:
    """A result with everything derived from it, for JSON."""
    ceiling = machine["scattered_gbps"][result.cell.row_bytes]
    bound = result.bound(ceiling)
    names = result.median
    return {
        **result.cell._asdict(),
        "bytes": result.cell.bytes,
        "us": {name: round(us, 3) for name, us in names.items()},
        "spread": {name: [round(result.low[name], 3), round(result.high[name], 3)] for name in names},
        "gbps": {name: round(result.gbps(name), 2) for name in names},
        "link_percent": {name: round(100 * result.gbps(name) / machine["copy_engine_gbps"], 1) for name in names},
        "bound_us": round(bound, 3),
        "over_bound": {name: round(us / bound, 3) for name, us in names.items()},
    }


def capture_graph(capture: Callable[[], None], reset: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `capture` launches."""
    reset()
    capture()  # compiles, and loads the code
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        capture()
    return graph


def time_replay(graph: torch.cuda.CUDAGraph, reset: Callable[[], None]) -> float:
    """Milliseconds of one replay, after `reset`."""
    reset()
    torch.cuda._sleep(200_000)  # the device is busy until the replay is queued
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def time_graph(capture: Callable[[], None], reset: Callable[[], None], replays: int) -> list[float]:
    """Milliseconds of each replay of what `capture` launches, `reset` before each."""
    graph = capture_graph(capture, reset)
    return [time_replay(graph, reset) for _ in range(replays + 1)][1:]


def measure(
    cells: Sequence[Cell],
    kernels: dict[str, SwapIn],
    *,
    replays: int,
    check: bool = True,
    arena: Arena | None = None,
) -> Iterator[Result]:
    """Time every kernel in every cell; they take turns, so that what drifts drifts for all. Yields as it goes."""
    arena = arena or Arena(cells, torch.device("cuda", torch.cuda.current_device()))
    for cell in cells:
        scene = Scene(arena, cell)
        result = Result(cell)
        graphs = {name: capture_graph(scene.steps(kernel), scene.reset) for name, kernel in kernels.items()}
        times: dict[str, list[float]] = {name: [] for name in kernels}
        for turn in range(replays):
            for name, graph in graphs.items():
                time_replay(graph, scene.reset)  # L2 is as this kernel leaves it
                times[name].append(time_replay(graph, scene.reset) * 1e3 / STEPS)
                if check and turn == replays - 1:
                    scene.verify(name)
        for name, us in times.items():
            result.median[name] = statistics.median(us)
            result.low[name], result.high[name] = min(us), max(us)
        yield result


def _wake(device: torch.device) -> None:
    """Some tenths of a second of work, for the clocks to rise."""
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device=device)
    for _ in range(200):
        square @ square
    torch.cuda.synchronize()


def scattered_ceiling(
    arena: Arena, row_bytes: int, *, blocks: Sequence[int] = (8, 16, 32, 64, 132)
) -> dict[int, float]:
    """GB/s at which scattered rows of host memory can be read from a ready plan, by number of thread blocks."""
    host = arena.host[: arena.batch * CONTEXT * row_bytes].view(-1, row_bytes)
    rows = arena.cache.numel() // row_bytes
    src = arena.host_locs[:, :TOP_K].contiguous()
    dst = torch.randperm(rows, device=arena.device, generator=arena.generator)[: src.numel()].int().view_as(src)
    count = torch.full((arena.batch,), TOP_K, dtype=torch.int32, device=arena.device)
    rates = {}
    for number in blocks:

        def copy(number: int = number) -> None:
            op.copy_planned(
                miss_src=src,
                miss_dst=dst,
                miss_count=count,
                num_real_reqs=None,
                host_cache=host,
                device_buffer=arena.cache[: rows * row_bytes].view(-1, row_bytes),
                item_size_bytes=row_bytes,
                blocks=number,
            )

        times = time_graph(copy, lambda: None, 5)
        rates[number] = src.numel() * row_bytes / statistics.median(times) / 1e6
    return rates


def copy_engine_gbps(arena: Arena) -> float:
    """GB/s of one large copy by the copy engine, host to device."""
    size = min(arena.host.numel(), arena.cache.numel(), 1 << 28)
    times = time_graph(lambda: arena.cache[:size].copy_(arena.host[:size], non_blocking=True), lambda: None, 5)
    return float(size / statistics.median(times) / 1e6)
