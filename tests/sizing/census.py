"""In a process of one release: every tensor of the real pools, allocators and coordinator, as JSON.

    python -m sizing.census

Three servers: "started", by the real start of a scheduler (`lifecycle.server`); "built", SGLang's same classes put
together by hand, with other sizes, fp8 rows and layers that share their top-k; "speculating", the same with draft
tokens where the release has that. And "plain", a device pool without HiSparse. Also what SGLang reckons per slot.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys

from lifecycle import server

from . import cases


def main() -> None:
    scheduler = server.start("--disable-overlap-schedule")
    module = importlib.import_module("sglang.srt.managers.hisparse_coordinator")
    found = {
        "started": of_coordinator(scheduler.hisparse_coordinator),
        "cells": {dtype: cell(scheduler, dtype) for dtype in cases.TORCH_DTYPES},
    }
    for name, case in cases.BUILT.items():
        if case.draft_tokens and not hasattr(module, "HiSparseSpecSwapManager"):
            continue
        found[name] = of_coordinator(build(module, case))
        found[f"plain {name}"] = census(("_kvcache", plain_pool(module, case)))
    print(json.dumps(found), flush=True)
    os._exit(0)


def census(*roots) -> dict[str, int]:
    """Bytes by owner and attribute, of every storage once; a list of tensors, one per layer, counts as one."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for owner, root in roots:
        _walk_object(root, owner, found, seen)
    return {name: size for name, size in found.items() if size}


def of_coordinator(coordinator) -> dict[str, int]:
    return census(("allocator", coordinator.token_to_kv_pool_allocator), ("coordinator", coordinator))


def _walk_object(thing, owner: str, found: dict[str, int], seen: set[int]) -> None:
    if not type(thing).__module__.startswith("sglang") or not hasattr(thing, "__dict__") or id(thing) in seen:
        return
    seen.add(id(thing))
    # A storage is named by the attribute that is it, not by a tuple of views of it.
    for name, value in sorted(vars(thing).items(), key=lambda pair: isinstance(pair[1], tuple)):
        for item in value if isinstance(value, (list, tuple)) else [value]:
            _count(item, owner, name, found, seen)


def _count(item, owner: str, name: str, found: dict[str, int], seen: set[int]) -> None:
    import torch

    if not isinstance(item, torch.Tensor):
        _walk_object(item, name, found, seen)
        return
    storage = item.untyped_storage()
    if storage.data_ptr() not in seen:
        seen.add(storage.data_ptr())
        found[f"{owner}.{name}"] = found.get(f"{owner}.{name}", 0) + storage.nbytes()


def build(module, case):
    """A coordinator over pools of SGLang's own classes, as its model runner builds them."""
    import torch

    hisparse = case.hisparse
    device = pool_class(module)(**pool_arguments(module, case), host_to_device_ratio=hisparse.host_to_device_ratio)
    allocator = module.HiSparseTokenToKVPoolAllocator(
        case.device_tokens,
        page_size=hisparse.page_size,
        dtype=getattr(torch, cases.TORCH_DTYPES[case.kv_dtype]),
        device="cpu",
        kvcache=device,
        need_sort=False,
        host_to_device_ratio=hisparse.host_to_device_ratio,
    )
    requests = module.ReqToTokenPool(
        size=case.requests, max_context_len=case.columns, device="cpu", enable_memory_saver=False
    )
    known = {
        "shared_index_layers": list(case.model.shared_index) or None,
        "num_draft_tokens": case.draft_tokens,
    }
    accepted = inspect.signature(module.HiSparseCoordinator.__init__).parameters
    return module.HiSparseCoordinator(
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        top_k=hisparse.top_k,
        device_buffer_size=hisparse.device_buffer_size,
        device="cpu",
        tp_group=torch.distributed.group.WORLD,
        host_to_device_ratio=hisparse.host_to_device_ratio,
        **{name: value for name, value in known.items() if name in accepted},
    )


def plain_pool(module, case):
    """The pool that serves without HiSparse: the parent class of HiSparse's."""
    parent = pool_class(module).__mro__[1]
    arguments = pool_arguments(module, case)
    if "skip_topk_layers" in inspect.signature(parent.__init__).parameters:
        arguments["skip_topk_layers"] = list(case.model.shared_index) or None
    return parent(**arguments)


def pool_class(module) -> type:
    return next(value for name, value in vars(module).items() if name in cases.POOL_CLASSES)


def pool_arguments(module, case) -> dict[str, object]:
    import torch

    model = case.model
    dtype = getattr(torch, cases.TORCH_DTYPES[case.kv_dtype])
    return {
        "size": case.device_tokens,
        "page_size": case.hisparse.page_size,
        "kv_lora_rank": model.kv_lora_rank,
        "dtype": dtype,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "layer_num": model.layers,
        "device": "cpu",
        "index_head_dim": model.index_head_dim,
        "enable_memory_saver": False,
        "kv_cache_dim": model.row_bytes(case.kv_dtype) // dtype.itemsize,
        "start_layer": 0,
        "end_layer": model.layers - 1,
    }


def cell(scheduler, kv_dtype: str) -> int:
    """What SGLang's own sizing takes one device slot for."""
    import torch

    runner = scheduler.tp_worker.model_runner
    dtype = getattr(torch, cases.TORCH_DTYPES[kv_dtype])
    if hasattr(runner, "get_cell_size_per_token"):
        runner.kv_cache_dtype = dtype
        return int(runner.get_cell_size_per_token(runner.num_effective_layers))
    sizing = importlib.import_module("sglang.srt.model_executor.pool_configurator")
    holder = getattr(runner, "kv_cache_configurator", None) or runner
    holder.kv_cache_dtype = dtype
    return int(sizing.DefaultPoolConfigurator(holder)._cell_size)


if __name__ == "__main__":
    sys.exit(main())
