"""Inside the scheduler process: what the pools hold, and a deliberate fault. On a CPU and on a GPU alike.

The report rides on SGLang's own `/server_info`, the fault on a request's id; neither is a new way in.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

_HELD = "hisparse_demo_held"
_STAGE = "hisparse_demo, of another stage: "
KEY = "hisparse_demo"  #: of the report in `/server_info`'s internal state
_FAULT = re.compile(r"hisparse-fault-(\d+)-(\d+)-(\d+)-(\d+)$")
_LATE = re.compile(r"hisparse-late-(\d+)-(\d+)$")


def fault_id(rank: int, layer: int, position: int, source: int) -> str:
    """Id of a request whose host row of `position` in `layer` is to get the digit of the row of `source`, on one rank.

    That is what a stale row looks like: the key is right, the value is another's.
    """
    return f"hisparse-fault-{rank}-{layer}-{position}-{source}"


def late_id(rank: int, turns: int) -> str:
    """Id of a request that comes to the staging queue of one rank `turns` iterations later than to the others'."""
    return f"hisparse-late-{rank}-{turns}"


def install() -> None:
    """Arm the hooks in this process; they go in when SGLang's modules are imported."""
    wrapt.register_post_import_hook(_hook_scheduler, "sglang.srt.managers.scheduler")
    wrapt.register_post_import_hook(_hook_coordinator, "sglang.srt.managers.hisparse_coordinator")


def _hook_scheduler(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "Scheduler.__init__", _remember_pools)
    wrapt.wrap_function_wrapper(module, "Scheduler.get_internal_state", _add_report)


def _hook_coordinator(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "HiSparseCoordinator.admit_request_into_staging", _hold_when_asked)
    wrapt.wrap_function_wrapper(module, "HiSparseCoordinator.collect_ready_reqs", _corrupt_when_asked)


def _remember_pools(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    scheduler.hisparse_demo_start = _free(scheduler)


def _add_report(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    result.internal_state[KEY] = {
        "start": scheduler.hisparse_demo_start,
        "now": _free(scheduler),
        "swap_in": _swap_in_counts(),
    }
    if not scheduler.pp_group.is_first_rank:  # whose answer is not sent
        print(f"{_STAGE}{json.dumps(result.internal_state[KEY])}", flush=True)
    return result


def join(report: dict[str, Any], other: dict[str, Any], where: str) -> None:
    """Add another stage's pools to a report, by names of their own, and what its swap-ins did."""
    for time in ("start", "now"):
        report[time] |= {f"{pool} {where}": free for pool, free in other[time].items()}
    if report["swap_in"]:
        report["swap_in"] = {what: n + other["swap_in"][what] for what, n in report["swap_in"].items()}


def other_stages(log: str) -> list[dict[str, Any]]:
    """Every report so far of pipeline stages behind the first, from a server's log."""
    return [json.loads(line.removeprefix(_STAGE)) for line in log.splitlines() if line.startswith(_STAGE)]


def _free(scheduler: Any) -> dict[str, int]:
    """Free slots of each pool, those of tensor-parallel ranks behind the first by names of their own."""
    mine = _free_here(scheduler)
    ranks = 1 if scheduler.tp_cpu_group is None else scheduler.tp_cpu_group.size()
    if ranks == 1:
        return mine
    import torch

    every: list[dict[str, int]] = [{}] * ranks
    torch.distributed.all_gather_object(every, mine, group=scheduler.tp_cpu_group)  # all ranks are asked together
    others = {f"{pool} of rank {i}": n for i, free in enumerate(every[1:], 1) for pool, n in free.items()}
    return every[0] | others


def _free_here(scheduler: Any) -> dict[str, int]:
    allocator = scheduler.token_to_kv_pool_allocator
    free = {"request slots": scheduler.req_to_token_pool.available_size()}
    if scheduler.hisparse_coordinator is None:
        return free | {"KV slots": int(allocator.available_size())}
    return free | {
        "logical slots": int(allocator.logical_attn_allocator.available_size()),
        "device slots": int(allocator.hisparse_attn_allocator.available_size()),
        "host slots": int(scheduler.hisparse_coordinator.mem_pool_host.available_size()),
    }


def _swap_in_counts() -> dict[str, int] | None:
    """Hits, misses and bytes over all layers; None where the CPU stand-in, which counts, is not in use."""
    stand_in = sys.modules.get("sglang_hisparse_plugin.demo.cpu.swap_in")
    return stand_in.counts() if stand_in else None


def _corrupt_when_asked(wrapped: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    ready = wrapped(*args, **kwargs)
    for req in ready:
        asked = _FAULT.match(req.rid)
        if asked and int(asked[1]) == _rank():
            corrupt(coordinator, req, *map(int, asked.groups()[1:]))
    if held := getattr(coordinator, _HELD, None):
        held.turns -= 1
        if not held.turns:
            coordinator.ack_staging_queue.append(held.act)
            setattr(coordinator, _HELD, None)
    return ready


@dataclass
class _Held:
    """What a staging queue does not show yet."""

    act: Any
    turns: int


def _hold_when_asked(wrapped: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    queue = coordinator.ack_staging_queue
    asked = _LATE.match(queue[-1].req.rid) if queue else None
    if asked and int(asked[1]) == _rank():
        setattr(coordinator, _HELD, _Held(queue.pop(), int(asked[2])))
    return result


def _rank() -> int:
    import torch

    return int(torch.distributed.get_rank())


def corrupt(coordinator: Any, req: Any, layer: int, position: int, source: int) -> None:
    """Give a request's host row of `position` the digit of the row of `source`."""
    upstream = importlib.import_module("sglang_hisparse_plugin.upstream")
    where = coordinator.req_to_host_pool[upstream.slot(req)].tolist()
    copy_digit(coordinator.mem_pool_host.kv_buffer[layer], where[source], where[position])


def copy_digit(rows: Any, source: int, target: int) -> None:
    """Of one row of a layer's KV into another."""
    digit = importlib.import_module("sglang_hisparse_plugin.demo.weights").ROW_DIGIT
    rows[target, ..., digit] = rows[source, ..., digit].clone()
