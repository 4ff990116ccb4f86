"""The most requests that fit on a rank, with and without HiSparse. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from . import formulas
from .amounts import GIB, round_up
from .given import MOST_FRACTION, Machine, Workload, device_budget, mem_fraction, own_reserve, reserve
from .hisparse import MAX_DEVICE_BUFFER
from .shapes import Server, SizingError, version

#: What SGLang holds back when it admits a prompt (schedule_policy.py, PrefillAdder): the new request's output, at most
#: CLIP tokens, and this share of what running requests may still write (the ratio it decays to: 0.7 x 0.14).
CLIP, NEW_TOKEN_RATIO = 4096, 0.098
#: Of host_to_device_ratio that is tried: what the smallest hot buffers need for a context of a million tokens.
MOST_RATIO = 512


@dataclass(frozen=True)
class Fit:
    """A server that fits, and what keeps it from being larger."""

    requests: int
    """At once on this rank."""
    server: Server
    device_bytes: int
    host_bytes: int
    limit: str


# --- what it takes ---


def device_bytes(server: Server) -> int:
    """Of one rank's pools and tables, and of the draft model's pool."""
    return formulas.total(server, "device") + formulas.draft_pool_bytes(server)


def slots_needed(work: Workload, requests: int) -> int:
    """Device slots for `requests` hot buffers, the last of which is being prefilled, as SGLang admits it."""
    page, growth = work.hisparse.page_size, min(work.output, CLIP)
    one = work.hisparse.padded_buffer + formulas.scratch_slots(work.server(0, 1, requests))
    admission = round_up(work.prompt, page) + growth + page + math.ceil((requests - 1) * NEW_TOKEN_RATIO * growth)
    return round_up((requests - 1) * one + max(admission, one + page), page)


def servers(work: Workload, requests: int) -> Iterator[Server]:
    """The servers that run so many requests, from the fewest device slots on; any other needs more of everything.

    Slots times ratio must hold the requests. Fewer slots save GPU memory, but slots x ratio then overshoots by more,
    and each of those tokens has a row on the host and an index key on the device: neither end is always the best.
    """
    page = work.hisparse.page_size
    least, logical = slots_needed(work, requests) // page, requests * work.total // page + 1  # pages
    ratio = min(-(-logical // least), MOST_RATIO)
    while ratio > 0:
        pages = max(least, -(-logical // ratio))
        ratio = max(1, -(-logical // pages))  # the smallest for which as many slots do
        yield work.server(pages * page, ratio, requests)
        ratio -= 1


def smallest(work: Workload, requests: int) -> Server:
    """The server with the fewest bytes on the device that runs so many requests, whatever it takes on the host."""
    return min(servers(work, requests), key=device_bytes)


def fitting(work: Workload, machine: Machine, requests: int) -> Iterator[Server]:
    """The servers that run so many requests and fit on GPU and host."""
    device, host = device_budget(work, machine, requests), machine.host_budget
    for server in servers(work, requests):
        if formulas.kv_rows(server) > device:
            return  # all others have more slots
        if formulas.total(server, "host") <= host and device_bytes(server) <= device:
            yield server


# --- the most that fits ---


def with_hisparse(work: Workload, machine: Machine) -> Fit:
    """The most requests with HiSparse.

    Raises:
        SizingError: SGLang refuses the context, the parallelism or the reserve, or not even one request fits; the text
            says what is short by how much.
    """
    formulas.check(work.server(0, 1, 1))
    machine.layout.check(work.model)
    _check_context(work)
    _check_reserve(work, machine)
    most = _most(lambda requests: any(fitting(work, machine, requests)), most_requests(work))
    if not most:
        raise SizingError(_too_long(work, machine))
    server = min(fitting(work, machine, most), key=device_bytes)
    limit = _limit(work, machine, most)
    return Fit(most, server, device_bytes(server), formulas.total(server, "host"), limit)


def without_hisparse(work: Workload, machine: Machine) -> Fit | None:
    """The most requests with every KV row on the device; None if not one fits."""

    def server(requests: int) -> Server:
        growth = math.ceil(requests * NEW_TOKEN_RATIO * min(work.output, CLIP))
        return work.server(requests * work.total + round_up(growth, work.hisparse.page_size), 1, requests)

    def size(requests: int) -> int:
        plain = server(requests)
        return formulas.plain_device_bytes(plain) + formulas.draft_pool_bytes(plain)

    most = _most(lambda requests: size(requests) <= device_budget(work, machine, requests), work.most_requests)
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
    for size in range(best + step, min(work.total, MAX_DEVICE_BUFFER) + 1, step):
        other = replace(work, hisparse=replace(work.hisparse, device_buffer_size=size))
        if not any(fitting(other, machine, fit.requests)):
            break
        best = size
    return best


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


def _check_context(work: Workload) -> None:
    longest = work.model.max_context
    if longest and work.prompt + work.output > longest:
        raise SizingError(
            f"{work.prompt} tokens of prompt and {work.output} of output are more than the {longest} that the model "
            "takes, and SGLang refuses such a --context-length: give a shorter --context or --output"
        )


def _check_reserve(work: Workload, machine: Machine) -> None:
    fraction = mem_fraction(work, machine, 1)
    if fraction > MOST_FRACTION:
        own = own_reserve(work, machine, 1)
        raise SizingError(
            f"--reserve {_gib(reserve(work, machine, 1))} of {_gib(machine.gpu)} makes --mem-fraction-static "
            f"{fraction / 1000}: above {MOST_FRACTION / 1000} a server has no memory for CUDA graphs and activations. "
            f"Give {_gib(machine.gpu - machine.gpu * MOST_FRACTION // 1000, up=True)} or more, or leave --reserve "
            f"out: SGLang itself keeps {_gib(own)} and more"
        )


def _limit(work: Workload, machine: Machine, most: int) -> str:
    """What the next request would be short of."""
    if most == most_requests(work):
        return "the number of requests allowed"
    larger = smallest(work, most + 1)
    if device_bytes(larger) <= device_budget(work, machine, most + 1):
        return "host memory"
    largest = max(parts(larger).items(), key=lambda part: part[1])
    host = formulas.total(list(servers(work, most + 1))[-1], "host") > machine.host_budget
    return f"GPU memory; most of it for {largest[0]}" + (" and host memory" if host else "")


def _too_long(work: Workload, machine: Machine) -> str:
    """Why not even one request fits, and what would help."""
    what = f"a context of {work.prompt + work.output} tokens fits nowhere"
    smaller = "use fp8_e4m3, " if work.kv_dtype == "bfloat16" else ""
    one, budget, kept = smallest(work, 1), device_budget(work, machine, 1), reserve(work, machine, 1)
    if budget <= 0:
        return (
            f"weights {_gib(machine.weights)} and reserve {_gib(kept)} leave nothing of the GPU's "
            f"{_gib(machine.gpu)}: spread the weights over more GPUs (--tp) or quantize them"
        )
    if device_bytes(one) > budget:
        return (
            f"{what}: one request needs {_gib(device_bytes(one))} on the GPU (a prompt is prefilled there, and index "
            f"keys stay there), and {_gib(budget)} are left beside weights {_gib(machine.weights)} and reserve "
            f"{_gib(kept)}. Shorten the context, {smaller}or put the weights on more GPUs (--tp)"
        )
    return (
        f"{what}: host memory is too small. One request needs {_gib(formulas.total(one, 'host'))} on each of "
        f"{machine.layout.ranks_per_node} ranks of a node, and each has {_gib(max(machine.host_budget, 0))}. Add host "
        f"memory (--host-mem), {smaller}or use fewer ranks per node"
    )


def _most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, given that what fits once fits for all smaller ones."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gib(size: int, up: bool = False) -> str:
    return f"{math.ceil(size * 10 / GIB) / 10 if up else size / GIB:.1f} GiB"
