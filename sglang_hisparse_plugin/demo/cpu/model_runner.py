"""From 0.5.11 to 0.5.17, SGLang builds the HiSparse coordinator only where it initialises a GPU; here, on the CPU."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import wrapt


def adapt(module: ModuleType) -> None:
    """Build the coordinator before the attention backend, which asks for it from 0.5.13 on."""
    if hasattr(module.ModelRunner, "init_attention_backend"):  # gone in 0.5.18, which builds it on any device
        wrapt.wrap_function_wrapper(module, "ModelRunner.init_attention_backend", _with_coordinator)


def _with_coordinator(wrapped: Any, runner: Any, args: Any, kwargs: Any) -> Any:
    if runner.server_args.enable_hisparse and runner.hisparse_coordinator is None and not runner.is_draft_worker:
        runner.hisparse_coordinator = _coordinator(runner)
    return wrapped(*args, **kwargs)


def _coordinator(runner: Any) -> Any:
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
    from sglang.srt.mem_cache.sparsity import parse_hisparse_config

    config = parse_hisparse_config(runner.server_args)
    ranks = runner.attention_tp_group if runner.server_args.enable_dp_attention else runner.tp_group
    arguments = {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
        "top_k": runner.model_config.hf_text_config.index_topk,
        "device_buffer_size": config.device_buffer_size,
        "device": runner.device,
        "tp_group": ranks.cpu_group,
        "host_to_device_ratio": config.host_to_device_ratio,
    }
    known = inspect.signature(HiSparseCoordinator.__init__).parameters
    return HiSparseCoordinator(**{name: value for name, value in arguments.items() if name in known})
