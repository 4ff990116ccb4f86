"""Reads tensors of the device while it decodes, and is not noticed.

What would be: an allocation on the device, a copy to or from pageable memory, ``item()``, a wait for a stream that
decodes. So there is a stream for it, pinned memory made before the server serves, and an event that is polled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POLL = 0.001  # seconds between two looks at whether the device has done it


class Aside:
    """A stream beside those that decode. On a CPU there is none, and everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Memory to copy into. To be made before the server serves: pinning holds the driver up."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._stream is not None)

    def copy(self, host: Tensor, device: Tensor) -> Tensor:
        """`host`, once it holds what `device` held some time since this was called."""
        self.do(lambda: host.copy_(device, non_blocking=True))
        return host

    def do(self, work: Callable[[], Any]) -> None:
        """Launch `work` and sleep until the device has done it. Not while a graph is being captured."""
        if self._stream is None:
            work()
            return
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record(self._stream)
        while not done.query():
            time.sleep(POLL)
