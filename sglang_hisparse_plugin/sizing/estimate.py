"""What a plan means, as plain data for tables, pictures and JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from . import formulas, given, kernel_model, plan
from .amounts import GIB
from .hisparse import MAX_DEVICE_BUFFER
from .shapes import COVERED, NEWEST, ModelShape, Server, SizingError, version


def per_token(server: Server) -> dict[str, Any]:
    """Bytes of a token by layer, and of all layers."""
    model, ratio = server.model, server.hisparse.host_to_device_ratio
    return {
        "row": server.row,
        "index_key": model.index_bytes,
        "host": model.layers * server.row,
        "device_index": model.layers * model.index_bytes,
        "device_slot": model.layers * (server.row + model.index_bytes * ratio),
        "sglang_reckons_slot": formulas.cell_bytes(server),
        "request_tables": sum(
            item.bytes
            for item in formulas.allocations(server)
            if item.place == "device" and item.owner in ("coordinator", "spec_swap", "req_to_token_pool")
        )
        // formulas.request_rows(server),
    }


def of_machine(work: given.Workload, machine: given.Machine, requests: int) -> dict[str, Any]:
    """Memory of one rank in bytes, and where it goes, with so many requests on a rank."""
    return {
        "gpu": machine.gpu,
        "weights": machine.weights,
        "reserve": given.reserve(work, machine, requests),
        "reserve_origin": "as SGLang itself reckons" if machine.reserve is None else "--reserve",
        "mem_fraction_static": given.mem_fraction(work, machine, requests) / 1000,
        "host": machine.host,
        "host_reserve": machine.host_reserve,
        "ranks_per_node": machine.layout.ranks_per_node,
        "device_budget": given.device_budget(work, machine, requests),
        "host_budget": machine.host_budget,
    }


def of_fit(fit: plan.Fit, groups: int) -> dict[str, Any]:
    """A fit, for one rank and for `groups` of ranks with requests of their own."""
    server = fit.server
    return {
        "requests": fit.requests * groups,
        "requests_per_rank": fit.requests,
        "device_tokens": server.device_tokens,
        "host_to_device_ratio": server.hisparse.host_to_device_ratio,
        "device_buffer_size": server.hisparse.device_buffer_size,
        "host_tokens": formulas.host_tokens(server) if fit.host_bytes else 0,
        "device_bytes": fit.device_bytes,
        "host_bytes": fit.host_bytes,
        "pinned_bytes": formulas.pinned_bytes(server) if fit.host_bytes else 0,
        "device_parts": plan.parts(server) if fit.host_bytes else None,
        "limit": fit.limit,
    }


def swap_in(fit: plan.Fit, rates: Iterable[float]) -> dict[str, Any]:
    """Milliseconds that a decode step of one rank spends in swap-in, by hit rate.

    Layers that share their top-k only copy, and do so beside the layers' own work: what the link needs for that is
    apart, in `shared_ms`. Draft tokens count as calls of their own.
    """
    server, model = fit.server, kernel_model.stored()
    kernels = {"plugin": kernel_model.OURS, "sglang": model.upstream(server.version)}
    shared = sum(server.model.shared_index) if server.version >= (0, 5, 18) else 0
    calls = (server.model.layers - shared) * max(1, server.draft_tokens)
    rows = []
    for rate in rates:
        misses = server.hisparse.top_k * (1 - rate) if server.context > server.hisparse.device_buffer_size else 0
        point = (fit.requests, misses, server.row, server.hisparse.device_buffer_size)
        rows.append(
            {
                "hit_rate": rate,
                "misses": round(misses, 1),
                **{
                    f"{name}_ms": round(model.call_us(kernel, *point) * calls / 1e3, 3)
                    for name, kernel in kernels.items()
                },
                "shared_ms": round(model.copy_us(fit.requests, misses, server.row) * shared / 1e3, 3),
                "bytes": round(misses * server.row * fit.requests * server.model.layers * max(1, server.draft_tokens)),
            }
        )
    return {
        "device": model.device,
        "commit": model.commit,
        "source": model.source,
        "sglang_kernel": kernels["sglang"],
        "batch": fit.requests,
        "calls": calls,
        "rows": rows,
    }


def by_context(work: given.Workload, machine: given.Machine, groups: int) -> list[dict[str, int]]:
    """Requests at once against the length of the prompt; 0 where it does not fit."""
    longest = work.model.max_context - work.output if work.model.max_context else max(work.prompt, 131072)
    lengths = {4096 << step for step in range(12) if 4096 << step <= longest} | {work.prompt}
    return [{"prompt": length, **_both(replace(work, prompt=length), machine, groups)} for length in sorted(lengths)]


def by_hot_buffer(work: given.Workload, machine: given.Machine, groups: int) -> list[dict[str, int]]:
    """Requests at once against the hot buffer."""
    page, now = work.hisparse.page_size, work.hisparse.device_buffer_size
    sizes = {work.hisparse.top_k * factor // 2 for factor in (2, 3, 4, 6, 8)} | {now}
    rows = []
    for size in sorted(size for size in sizes if size % page == 0 and size <= MAX_DEVICE_BUFFER):
        other = replace(work, hisparse=replace(work.hisparse, device_buffer_size=size))
        rows.append({"device_buffer_size": size, "requests": _both(other, machine, groups)["hisparse"]})
    return rows


def notes(work: given.Workload, machine: given.Machine, fit: plan.Fit, given_ratio: int | None) -> list[str]:
    """What a reader must know beside the numbers; `given_ratio` is that of --hisparse-config."""
    server, layout = fit.server, machine.layout
    ratio, buffer = server.hisparse.host_to_device_ratio, server.hisparse.device_buffer_size
    own, kept = (kind(work, machine, fit.requests) for kind in (given.own_reserve, given.reserve))
    reckoned, real = formulas.cell_bytes(server), per_token(server)["device_slot"]
    larger = plan.larger_buffer(work, machine, fit)
    plain = plan.without_hisparse(work, machine)
    without = plain.requests if plain else 0
    found = {
        f"host_to_device_ratio {given_ratio} of --hisparse-config is replaced by the one worked out, {ratio}": (
            given_ratio not in (None, ratio)
        ),
        f"requests of {server.context} tokens fit into a hot buffer of {buffer}: nothing will be swapped in, and "
        "HiSparse only costs here": server.context <= buffer,
        f"no more requests fit with HiSparse than without: {fit.requests} and {without} on a rank, limited by "
        f"{fit.limit}. Serve without it, or raise that limit": fit.requests <= without,
        f"{work.model.name} is unknown here: it is taken to lay out its cache as DeepSeek-V3.2 does": (
            work.model.name not in (*COVERED, ModelShape.name)
        ),
        f"the reserve is {kept / GIB:.1f} GiB, and SGLang itself would keep {own / GIB:.1f} GiB for "
        "activations and CUDA graphs: it may run out of memory": kept < own,
        f"SGLang {work.release} takes a device slot for {reckoned} bytes, and it has {real}: without "
        "--max-total-tokens its pools would be larger than what it set aside for them": (
            reckoned < real and not work.draft_tokens
        ),
        f"SGLang {work.release} has no speculation with HiSparse of its own: the plugin's is reckoned with, whose "
        "tables of some MB are left out": bool(work.draft_tokens) and version(work.release) < (0, 5, 22),
        f"the configuration of {work.model.name} has no next-token layer: name a draft model with "
        "--speculative-draft-model-path": (
            bool(work.draft_tokens) and not work.model.draft_layers and work.model.name != ModelShape.name
        ),
        f"{layout.nodes} nodes: on each add --node-rank (0 to {layout.nodes - 1}) and --dist-init-addr HOST:PORT of "
        "the first": layout.nodes > 1,
        f"the formulas were checked up to SGLang {NEWEST}": version(work.release) > version(NEWEST),
        f"a device_buffer_size of {larger} fits at the same concurrency, for a higher hit rate": larger > buffer,
    }
    return [text for text, holds in found.items() if holds]


def _both(work: given.Workload, machine: given.Machine, groups: int) -> dict[str, int]:
    plain = plan.without_hisparse(work, machine)
    try:
        requests = plan.with_hisparse(work, machine).requests
    except SizingError:
        requests = 0
    return {"hisparse": requests * groups, "without": plain.requests * groups if plain else 0}
