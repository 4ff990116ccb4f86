"""SGLang's own verification on our op: every row, pass by pass, and when its own kernel is asked instead.

That a server walks right so is seen in tests/e2e.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "speculative"))

import swap_scene
from swap_scene import Calls, Cell, Load

from sglang_hisparse_plugin.overlays import swap_in
from sglang_hisparse_plugin.speculative import own, rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Manager:
    """As much of SGLang's `HiSparseSpecSwapManager` as is looked at."""

    def __init__(self, coordinator: Any, slots: int, steps: int) -> None:
        self._coordinator = coordinator
        self.top_k_device_locs = torch.full((slots, steps, coordinator.top_k), -1, dtype=torch.int32)


class Own(Calls):
    """Through the hook, in the shapes in which SGLang asks; two layers that share their tables take turns."""

    def prepare(self) -> None:
        super().prepare()
        coordinator = self.rows.coordinator
        for tables in ("req_device_buffer_tokens", "req_device_buffer_token_locs", "lru_slots"):
            setattr(coordinator, tables, getattr(coordinator, tables).expand(2, -1, -1))
        for pool in (coordinator.mem_pool_device, coordinator.mem_pool_host):
            pool.kv_buffer = pool.kv_buffer * 2
        self.manager = Manager(coordinator, self.cell.batch, self.cell.drafts)

    def call(self, selected: torch.Tensor) -> torch.Tensor:
        seen = (self.lengths.unsqueeze(1) + 1 + torch.arange(self.cell.drafts)).int().flatten()
        for layer in (0, 1):
            found = swap_in.verify(refuse, self.manager, self.requests, seen, selected, layer)
        assert found.data_ptr() == self.manager.top_k_device_locs.data_ptr()
        return found


def refuse(*_args: Any, **_kwargs: Any) -> None:
    raise AssertionError("SGLang's kernel was asked")


def scene(drafts: int, batch: int = 3) -> Own:
    cell = Cell(batch, drafts, 12, 24, top_k=64, context=1024)
    host = swap_scene.host_memory(cell.batch * cell.context, cell.row_bytes, pinned=False)
    return Own(Load(cell, 4, host, torch.device("cpu")))


@pytest.mark.parametrize("batch", [1, 3])
def test_every_row_is_right(batch: int) -> None:
    scene(2, batch).check()


def test_a_wrong_row_of_the_host_is_seen() -> None:
    tried = scene(2)
    load = tried.load
    missed = set(load.timed[0][0].flatten().tolist()) - set(load.warm[-1][0].flatten().tolist())
    load.host[load.host_locs[0, missed.pop()]] += 1
    with pytest.raises(RuntimeError, match="rows are wrong"):
        tried.check()


def test_lengths_are_read_anew_in_each_pass_and_once() -> None:
    """In a model of one layer, too; requests come and go between passes."""
    tried = scene(2)
    seen = torch.tensor([101, 102, 201, 202], dtype=torch.int32)
    selected = torch.zeros((2, 2, 64), dtype=torch.int32)
    for layer, base in ((0, 0), (1, 500), (0, 7), (0, 9)):
        own.swap_in(
            tried.manager,
            req_pool_indices=tried.requests[:2],
            compressed_seq_lens=seen + base,
            top_k_result=selected,
            layer_id=layer,
        )
        now = own._passes[tried.manager]
        expected = 0 if layer else base
        assert now.committed[:2].tolist() == [100 + expected, 200 + expected]
        assert now.rows.lengths[:, :2].tolist() == [[101 + expected, 201 + expected], [102 + expected, 202 + expected]]


@pytest.mark.parametrize(
    ("steps", "top_k", "buffer", "plan"),
    [
        (4, 64, 256, {}),  # SGLang's kernel is faster
        (2, 64, 64, {}),  # its scratch holds what the buffer does not
        (2, 32, 128, {}),  # fewer than the coordinator's
        (2, 64, 128, {"miss_count": torch.zeros(1)}),  # another layer copies by plan
    ],
)
def test_otherwise_sglangs_kernel_is_asked(steps: int, top_k: int, buffer: int, plan: dict[str, Any]) -> None:
    manager = SimpleNamespace(_coordinator=SimpleNamespace(top_k=64, device_buffer_size=buffer))
    selected = torch.zeros((1, steps, top_k), dtype=torch.int32)
    asked: list[Any] = []
    swap_in.verify(lambda *a, **k: asked.append((a, k)), manager, "slots", "lengths", selected, layer_id=3, **plan)
    (args, kwargs) = asked[0]
    assert args == (manager,)
    assert (
        kwargs
        == {
            "req_pool_indices": "slots",
            "compressed_seq_lens": "lengths",
            "top_k_result": selected,
            "layer_id": 3,
        }
        | plan
    )


def test_a_failure_after_an_answer_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernel would go by tables that are as they were before."""
    tried = scene(2)
    monkeypatch.setattr(swap_in, "_failed", [])
    tried.check()

    def fails(**_call: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as failing, pytest.raises(RuntimeError, match="ends rather than read wrong rows"):
        failing.setattr(rows, "swap_in", fails)
        tried.check()
    assert not swap_in._failed
    swap_in._failed.append(RuntimeError("another op cannot be built"))
    tried.check()  # this one can


def test_a_failure_before_any_answer_leaves_all_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = scene(2)
    tried.prepare()
    monkeypatch.setattr(swap_in, "_failed", [])
    asked: list[Any] = []

    def fails(**_call: Any) -> None:
        raise RuntimeError("no compiler")

    selected = torch.zeros((3, 2, 64), dtype=torch.int32)
    seen = torch.full((6,), 100, dtype=torch.int32)
    for serve in (fails, rows.swap_in):
        monkeypatch.setattr(rows, "swap_in", serve)
        swap_in.verify(lambda *a, **k: asked.append(k), tried.manager, tried.requests, seen, selected, 0)
    assert len(asked) == 2 and len(swap_in._failed) == 1
