"""Inside the scheduler processes of a prefill and a decode server: a row made wrong on the way, or after it."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import wrapt

from . import probe

_SENT, _KEPT = "sent", "kept"
_FAULT = re.compile(rf"hisparse-pd-({_SENT}|{_KEPT})-(\d+)-(\d+)-(\d+)$")


def sent_id(layer: int, position: int, source: int) -> str:
    """Id of a request whose row of `position` in `layer` is sent with the digit of the row of `source`."""
    return f"hisparse-pd-{_SENT}-{layer}-{position}-{source}"


def kept_id(layer: int, position: int, source: int) -> str:
    """The same of a row that arrived as it was, in the decode server's host pool."""
    return f"hisparse-pd-{_KEPT}-{layer}-{position}-{source}"


def install() -> None:
    """Arm the hooks in this process; they go in when SGLang's modules are imported."""
    wrapt.register_post_import_hook(_hook_scheduler, "sglang.srt.managers.scheduler")
    wrapt.register_post_import_hook(_hook_coordinator, "sglang.srt.managers.hisparse_coordinator")


def _hook_scheduler(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "Scheduler.send_kv_chunk", _send)


def _hook_coordinator(module: ModuleType) -> None:
    wrapt.wrap_function_wrapper(module, "HiSparseCoordinator.admit_request_direct", _keep)


def _asked(req: Any, what: str) -> tuple[int, ...] | None:
    asked = _FAULT.match(req.rid)
    return tuple(map(int, asked.groups()[1:])) if asked and asked[1] == what else None


def _send(wrapped: Any, scheduler: Any, args: Any, kwargs: Any) -> Any:
    req = args[0] if args else kwargs["req"]
    if asked := _asked(req, _SENT):
        _corrupt(scheduler, req, *asked)
    return wrapped(*args, **kwargs)


def _keep(wrapped: Any, coordinator: Any, args: Any, kwargs: Any) -> Any:
    req = args[0] if args else kwargs["req"]
    if asked := _asked(req, _KEPT):  # before: short prompts are loaded from the host pool here
        probe.corrupt(coordinator, req, *asked)
    return wrapped(*args, **kwargs)


def _corrupt(scheduler: Any, req: Any, layer: int, position: int, source: int) -> None:
    upstream = importlib.import_module("sglang_hisparse_plugin.upstream")
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    slots = scheduler.req_to_token_pool.req_to_token[upstream.slot(req)].tolist()
    probe.copy_digit(pool.kv_buffer[layer], slots[source], slots[position])
