"""Inside the scheduler process: what the pools hold, and a deliberate fault. On a CPU and on a GPU alike.

The report rides on SGLang's own `/server_info`, the fault on a request's id; neither is a new way in.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType
from typing import Any

import wrapt

KEY = "hisparse_demo"  #: of the report in `/server_info`'s internal state
_FAULT = re.compile(r"hisparse-fault-(\d+)-(\d+)-(\d+)$")


def fault_id(layer: int, position: int, source: int) -> str:
    """Id of a request whose host row of `position` in `layer` is to get the digit of the row of `source`.

    That is what a stale row looks like: the key is right, the value is another's.
    """
    return f"hisparse-fault-{layer}-{position}-{source}"


def install() -> None:
    """Arm the hooks in this process; they go in when SGLang's modules are imported."""
    wrapt.register_post_import_hook(_hook_scheduler, "sglang.srt.managers.scheduler")
    wrapt.register_post_import_hook(_hook_coordinator, "sglang.srt.managers.hisparse_coordinator")


def _hook_scheduler(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "Scheduler.__init__", _remember_pools)
    wrapt.wrap_function_wrapper(module, "Scheduler.get_internal_state", _add_report)


def _hook_coordinator(module: ModuleType) -> None:
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
    return result


def _free(scheduler: Any) -> dict[str, int]:
    """Free slots of each pool."""
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
        if asked := _FAULT.match(req.rid):
            _corrupt(coordinator, req, *map(int, asked.groups()))
    return ready


def _corrupt(coordinator: Any, req: Any, layer: int, position: int, source: int) -> None:
    upstream = importlib.import_module("sglang_hisparse_plugin.upstream")
    model = importlib.import_module("sglang_hisparse_plugin.demo.model")
    rows = coordinator.mem_pool_host.kv_buffer[layer]
    where = coordinator.req_to_host_pool[upstream.slot(req)].tolist()
    digit = model.ROW_DIGIT
    rows[where[position], ..., digit] = rows[where[source], ..., digit].clone()
