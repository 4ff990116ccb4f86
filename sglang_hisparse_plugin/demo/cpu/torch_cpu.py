"""torch on a CPU, as far as SGLang's GPU code paths ask it for GPU things."""

from __future__ import annotations

import functools
from types import ModuleType, SimpleNamespace
from typing import Any

_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def adapt(torch: ModuleType) -> None:
    """Streams and events complete at once, nothing is pinned, and the capability asked for is that of a Hopper GPU."""
    _complete_streams(torch)
    for name in _FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.cuda.cudart = lambda: SimpleNamespace(
        cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0, cudaGetErrorString=str
    )
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.Event, torch.cuda.current_stream = torch.cpu.Event, torch.cpu.current_stream
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cpu._is_amx_tile_supported = lambda: (
        False
    )  # AMX machines would call CPU kernels of the stubbed sgl_kernel


def _complete_streams(torch: ModuleType) -> None:
    stream, event = torch.cpu.Stream, torch.cpu.Event

    def record_event(self: Any, recorded: Any = None) -> Any:
        return recorded or event()

    stream.record_event = record_event
    stream.synchronize = stream.query = lambda self: True
    event.__init__ = lambda self, *args, **kwargs: None  # SGLang passes enable_timing and the like


def _unpinned(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make
