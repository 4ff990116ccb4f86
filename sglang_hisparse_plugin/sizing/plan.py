"""The most requests that fit on a rank, with and without HiSparse, and the flags that say so. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import formulas
from .shapes import HiSparse, ModelShape, Server, SizingError, version

GIB = 1 << 30
#: What SGLang holds back when it admits a prompt (schedule_policy.py, PrefillAdder): the new request's output, at most
#: CLIP tokens, and this share of what running requests may still write (the ratio it decays to: 0.7 x 0.14).
CLIP, NEW_TOKEN_RATIO = 4096, 0.098
#: Requests of one rank that SGLang goes to by itself at most (resolve_max_num_reqs).
MOST_REQUESTS = 4096


@dataclass(frozen=True)
class Machine:
    """Memory of one rank; bytes."""

    gpu: int
    weights: int
    """Of one GPU."""
    reserve: int
    """Kept free on the GPU for activations and CUDA graphs."""
    host: int
    """Of the node."""
    host_reserve: int
    """Kept free on the node; SGLang itself insists on 10 GiB."""
    ranks_per_node: int

    @property
    def device_budget(self) -> int:
        return self.gpu - self.weights - self.reserve

    @property
    def host_budget(self) -> int:
        return (self.host - self.host_reserve) // self.ranks_per_node


@dataclass(frozen=True)
class Workload:
    """What is served."""

    release: str
    model: ModelShape
    hisparse: HiSparse
    """Its ratio is where a search starts from, not what comes out."""
    kv_dtype: str
    prompt: int
    output: int
    draft_tokens: int = 0
    most_requests: int = MOST_REQUESTS

    @property
    def total(self) -> int:
        """Tokens of a request at its end, in whole pages."""
        page = self.hisparse.page_size
        return _up(self.prompt + self.output + self.draft_tokens, page)

    def server(self, device_tokens: int, ratio: int, requests: int) -> Server:
        return Server(
            release=self.release,
            model=self.model,
            hisparse=replace(self.hisparse, host_to_device_ratio=ratio),
            kv_dtype=self.kv_dtype,
            device_tokens=device_tokens,
            requests=requests,
            context=self.prompt + self.output,
            draft_tokens=self.draft_tokens,
        )


@dataclass(frozen=True)
class Fit:
    """A server that fits, and what keeps it from being larger."""

    requests: int
    """At once on this rank."""
    server: Server
    device_bytes: int
    host_bytes: int
    limit: str


def device_bytes(server: Server) -> int:
    """Of one rank's pools and tables, and of the draft model's pool."""
    return formulas.total(server, "device") + formulas.draft_pool_bytes(server)


def slots_needed(work: Workload, requests: int) -> int:
    """Device slots for `requests` hot buffers, the last of which is being prefilled, as SGLang admits it."""
    page, growth = work.hisparse.page_size, min(work.output, CLIP)
    one = work.hisparse.padded_buffer + formulas.scratch_slots(work.server(0, 1, requests))
    admission = _up(work.prompt, page) + growth + page + math.ceil((requests - 1) * NEW_TOKEN_RATIO * growth)
    return _up((requests - 1) * one + max(admission, one + page), page)


def smallest(work: Workload, requests: int) -> Server:
    """The server with the fewest bytes on the device that runs so many requests."""
    page, slots, logical = (
        work.hisparse.page_size,
        slots_needed(work, requests),
        requests * work.total + work.hisparse.page_size,
    )
    enough = max(1, -(-logical // slots))
    found = [
        work.server(max(slots, _up(-(-logical // ratio), page)), ratio, requests)
        for ratio in (enough, max(1, enough - 1))
    ]
    return min(found, key=device_bytes)


def with_hisparse(work: Workload, machine: Machine) -> Fit:
    """The most requests with HiSparse.

    Raises:
        SizingError: the model takes no such context, or not even one fits; the text says what is short by how much.
    """
    formulas.check(work.server(0, 1, 1))
    longest = work.model.max_context
    if longest and work.prompt + work.output > longest:
        raise SizingError(
            f"{work.prompt} tokens of prompt and {work.output} of output are more than the {longest} that the model "
            "takes, and SGLang refuses such a --context-length: give a shorter --context or --output"
        )

    def fits(requests: int) -> bool:
        server = smallest(work, requests)
        return device_bytes(server) <= machine.device_budget and formulas.total(server, "host") <= machine.host_budget

    most = _most(fits, most_requests(work))
    server = smallest(work, max(most, 1))
    fit = Fit(most, server, device_bytes(server), formulas.total(server, "host"), "")
    if not most:
        raise SizingError(_too_long(work, machine, fit))
    return replace(fit, limit=_limit(work, machine, smallest(work, most + 1), most))


def without_hisparse(work: Workload, machine: Machine) -> Fit | None:
    """The most requests with every KV row on the device; None if not one fits."""

    def server(requests: int) -> Server:
        growth = math.ceil(requests * NEW_TOKEN_RATIO * min(work.output, CLIP))
        return work.server(requests * work.total + _up(growth, work.hisparse.page_size), 1, requests)

    def size(requests: int) -> int:
        plain = server(requests)
        return formulas.plain_device_bytes(plain) + formulas.draft_pool_bytes(plain)

    most = _most(lambda requests: size(requests) <= machine.device_budget, work.most_requests)
    if not most:
        return None
    limit = "the number of requests allowed" if most == work.most_requests else "GPU memory: KV rows"
    return Fit(most, server(most), size(most), 0, limit)


def most_requests(work: Workload) -> int:
    """What is allowed, and what SGLang's speculation with HiSparse bears."""
    rows = work.hisparse.device_buffer_size - 1
    speculating = work.draft_tokens and version(work.release) >= (0, 5, 22)
    return min(work.most_requests, rows) if speculating else work.most_requests


def larger_buffer(work: Workload, machine: Machine, fit: Fit, step: int = 1024) -> int:
    """The largest hot buffer, in steps of `step` slots, with which as many requests still fit."""
    best = work.hisparse.device_buffer_size
    for size in range(best + step, min(work.total, 32768) + 1, step):
        other = replace(work, hisparse=replace(work.hisparse, device_buffer_size=size))
        server = smallest(other, fit.requests)
        if device_bytes(server) > machine.device_budget or formulas.total(server, "host") > machine.host_budget:
            break
        best = size
    return best


def mem_fraction(server: Server, machine: Machine) -> float:
    """The smallest --mem-fraction-static, to three places, with which SGLang itself finds so many slots.

    SGLang takes (free after the weights) - (free before) x (1 - fraction) for the pools, divided by `cell_bytes`.
    """
    free = machine.gpu - machine.weights
    fraction = 1 - (free - server.device_tokens * formulas.cell_bytes(server)) / machine.gpu
    return math.ceil(fraction * 1000) / 1000


def flags(fit: Fit, machine: Machine, ranks: int) -> list[str]:
    """Flags of the server besides those of parallelism; `ranks` share --max-running-requests: DP attention's."""
    server = fit.server
    config = {
        "top_k": server.hisparse.top_k,
        "device_buffer_size": server.hisparse.device_buffer_size,
        "host_to_device_ratio": server.hisparse.host_to_device_ratio,
    }
    return [
        "--enable-hisparse --disable-radix-cache",
        f"--hisparse-config '{json.dumps(config, separators=(',', ':'))}'",
        f"--kv-cache-dtype {server.kv_dtype} --page-size {server.hisparse.page_size}",
        f"--context-length {server.context}",
        f"--max-running-requests {fit.requests * ranks}",
        f"--max-total-tokens {server.device_tokens}",
        f"--mem-fraction-static {mem_fraction(server, machine):.3f}",
    ]


def _limit(work: Workload, machine: Machine, next_larger: Server, most: int) -> str:
    """What the next request would be short of."""
    if most == most_requests(work):
        return "the number of requests allowed"
    short = []
    if device_bytes(next_larger) > machine.device_budget:
        largest = max(parts(next_larger).items(), key=lambda part: part[1])
        short.append(f"GPU memory; most of it for {largest[0]}")
    if formulas.total(next_larger, "host") > machine.host_budget:
        short.append("host memory")
    return " and ".join(short)


def _too_long(work: Workload, machine: Machine, one: Fit) -> str:
    """Why not even one request fits, and what would help."""
    what = f"a context of {work.prompt + work.output} tokens fits nowhere"
    smaller = "use fp8_e4m3, " if work.kv_dtype == "bfloat16" else ""
    if machine.device_budget <= 0:
        return (
            f"weights {_gib(machine.weights)} and reserve {_gib(machine.reserve)} leave nothing of the GPU's "
            f"{_gib(machine.gpu)}: spread the weights over more GPUs (--tp) or quantize them"
        )
    if one.device_bytes > machine.device_budget:
        return (
            f"{what}: one request needs {_gib(one.device_bytes)} on the GPU (a prompt is prefilled there, and index "
            f"keys stay there), and {_gib(machine.device_budget)} are left beside weights and reserve. Shorten the "
            f"context, {smaller}or put the weights on more GPUs (--tp)"
        )
    return (
        f"{what}: host memory is too small. One request needs {_gib(one.host_bytes)} on each of "
        f"{machine.ranks_per_node} ranks of a node, and each has {_gib(max(machine.host_budget, 0))}. Add host memory "
        f"(--host-mem), {smaller}or use fewer ranks per node"
    )


def parts(server: Server) -> dict[str, int]:
    """Bytes on the device by what they are for."""
    named = {"kv_buffer": "hot buffers, prefill", "buffer": "index keys"}
    named |= {"index_k_with_scale_buffer": "index keys", "full_to_hisparse_device_index_mapping": "logical slots"}
    found = dict.fromkeys(["hot buffers, prefill", "index keys", "logical slots", "tables per request"], 0)
    for item in formulas.allocations(server):
        if item.place == "device":
            part = named.get(item.name, "logical slots" if "allocator" in item.owner else "tables per request")
            found[part] += item.bytes
    if draft := formulas.draft_pool_bytes(server):
        found["draft model's KV"] = draft
    return found


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, given that what fits once fits for all smaller ones."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
