"""SGLang's swap-in kernel, replaced by the package's reference op in plain torch, which counts here what it does."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

_counters: list[Any] = []  # the op's counters


def counts() -> dict[str, int]:
    """What all swap-ins of this process did together, over requests and layers."""
    values = _counters[0][:3].tolist() if _counters else [0, 0, 0]
    return dict(zip(("hits", "misses", "bytes"), values, strict=True))


def adapt(module: ModuleType) -> None:
    """Set in SGLang's wrapper module, before the coordinator imports the functions by name."""
    for function in (load_cache_to_device_buffer_mla, copy_cache_planned_mla):
        setattr(module, function.__name__, function)


def adapt_reference(module: ModuleType) -> None:
    """Let the reference op count, whoever calls it."""
    wrapt.wrap_function_wrapper(module, "swap_in", _counted)


def load_cache_to_device_buffer_mla(*, page_size: int = 1, block_size: int = 256, **arguments: Any) -> None:
    """SGLang's arguments, without those of a launch."""
    from sglang_hisparse_plugin.kernels import reference

    reference.swap_in(**arguments)


def copy_cache_planned_mla(*, num_blocks: int = 4, block_size: int = 1024, **arguments: Any) -> None:
    """The copy of a recorded plan; `skip_io` and DeepSeek-V4's layout have no use here and are refused."""
    from sglang_hisparse_plugin.kernels import reference

    if arguments.pop("skip_io", False) or arguments.pop("is_dsv4_layout", False):
        raise NotImplementedError("skip_io and DeepSeek-V4's layout have no CPU stand-in")
    reference.copy_planned(**arguments)


def _counted(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("counters") is None:
        import torch

        from sglang_hisparse_plugin.kernels.counters import COUNTERS

        if not _counters:
            _counters.append(torch.zeros(COUNTERS, dtype=torch.int64))
        kwargs = kwargs | {"counters": _counters[0]}
    return wrapped(*args, **kwargs)
