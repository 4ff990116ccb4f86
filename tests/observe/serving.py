"""A coordinator whose selections can be recorded, served by the test itself, and its process's recorder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from sglang_hisparse_plugin.config import Config
from sglang_hisparse_plugin.observe import trace
from sglang_hisparse_plugin.observe.recorder import Recorder
from sglang_hisparse_plugin.observe.request import Request

LAYERS, SLOTS, HOT, TOP_K = 3, 4, 8, 2


class Serving:
    """Layers 0 and 2 of three can be recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.lru = torch.zeros(LAYERS, SLOTS, HOT, dtype=torch.int16)
        coordinator = SimpleNamespace(lru_slots=self.lru, top_k=TOP_K, item_size_bytes=656)
        trace.attach(coordinator, Config(trace_dir=str(folder), trace_layers=(0, 2)))
        found = trace.recorder()
        assert found is not None
        self.recorder: Recorder = found
        self.step = 0

    @property
    def armed(self) -> bool:
        return int(self.recorder.ring.armed[0]) == 1

    def call(self, layer: int) -> list[list[int]]:
        """Two requests and a row of padding; returns the rows that are to be recorded."""
        self.step += 1
        tokens = torch.tensor([[self.step, 1], [self.step, 2], [self.step, 3]], dtype=torch.int32)
        lengths = torch.tensor([50 + self.step, 60 + self.step, 1])
        call = {"lru_slots": self.lru[layer], "req_pool_indices": torch.tensor([3, 1, 0]), "top_k_tokens": tokens}
        call |= {"seq_lens": lengths, "num_real_reqs": torch.tensor([2], dtype=torch.int32)}
        trace.record(call)
        return [[layer, 3, 0, 50 + self.step, self.step, 1], [layer, 1, 0, 60 + self.step, self.step, 2]]

    def recording(self, wanted: Request) -> Recording:
        """Have the recorder record, and come back when it does."""
        found = Recording(self, wanted)
        until(lambda: self.armed)
        return found


class Recording:
    """A recording in a thread of its own."""

    def __init__(self, serving: Serving, wanted: Request) -> None:
        self._done: list[Path] = []
        self._thread = threading.Thread(target=lambda: self._done.append(serving.recorder.record(wanted)))
        self._thread.start()

    def file(self) -> Path:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._done[0]


def until(condition: Callable[[], bool], patience: float = 30) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
