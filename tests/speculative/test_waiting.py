"""Nothing of a verification waits for the device: no tensor of the host is brought there, no number is brought back.

The step runs on torch's `meta` device, whose tensors hold nothing, while every operation is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_hisparse_plugin.speculative import hooks, rows

STEPS, REQUESTS, SLOTS, HOT, LENGTH = 3, 2, 4, 8, 40
#: a number of Python's that becomes a tensor, a tensor that becomes one, an index whose size is not known
WAITING = ("scalar_tensor", "_local_scalar_dense", "nonzero")


class Watched(TorchDispatchMode):
    """Refuses what would wait if `meta` were a GPU."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        places = {tensor.device for tensor in tensors} | {each for each in leaves if isinstance(each, torch.device)}
        name = function.__name__.partition(".")[0]
        waits = name in WAITING or (name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:]))
        if len(places) > 1 or (waits and torch.device("meta") in places):
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def coordinator() -> SimpleNamespace:
    def whole(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="meta")

    device = SimpleNamespace(
        page_size=8,
        full_to_hisparse_device_index_mapping=whole(SLOTS * LENGTH),
        kv_buffer=[whole(1)],
        transfer_values_on_device=lambda *_: None,
    )
    host = SimpleNamespace(
        backup_from_device_all_layer=lambda *_, **__: None, kv_buffer=[whole(1)], token_stride_size=1
    )
    made = SimpleNamespace(
        device_buffer_size=HOT,
        top_k=2,
        num_real_reqs=whole(1),
        mem_pool_device=device,
        mem_pool_host=host,
        req_to_host_pool=whole(SLOTS, LENGTH),
        req_to_device_buffer=whole(SLOTS, 2 * HOT),
        req_device_buffer_tokens=[whole(SLOTS, HOT)],
        req_device_buffer_token_locs=[whole(SLOTS, HOT)],
        lru_slots=[whole(SLOTS, HOT)],
    )
    made.verify_rows = rows.VerifyRows(made, STEPS)
    made.verify_rows._reserved[:] = LENGTH
    return made


@pytest.fixture
def step(coordinator: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """One of two requests: scheduled, bound, answered in one layer, settled."""
    monkeypatch.setattr(rows, "swap_in", lambda **_: None)
    monkeypatch.setattr(rows.start, "counters_for", lambda _: None)
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        req_pool_indices=torch.zeros(REQUESTS, dtype=torch.int64, device="meta"),
        seq_lens=torch.zeros(REQUESTS, dtype=torch.int64, device="meta"),
        out_cache_loc=torch.zeros(REQUESTS * STEPS, dtype=torch.int64, device="meta"),
    )
    selected = torch.zeros((REQUESTS * STEPS, 2), dtype=torch.int32, device="meta")
    worker = SimpleNamespace(model_runner=SimpleNamespace(hisparse_coordinator=coordinator))

    def run(*_: Any, **__: Any) -> None:
        coordinator.verify_rows.swap_in(0, batch, selected)

    def whole() -> None:
        coordinator.verify_rows.prepare([(0, LENGTH), (1, LENGTH)])
        hooks.forward_batch_generation(run, worker, batch, is_verify=True)

    return whole


def test_a_step_waits_for_nothing(step: Callable[[], None]) -> None:
    with Watched():
        step()


@pytest.mark.parametrize(
    "wait",
    [
        lambda pool: pool.full_to_hisparse_device_index_mapping.__setitem__(torch.zeros(2, device="meta").long(), 0),
        lambda pool: torch.tensor([1, 2]).to("meta"),
        lambda pool: int(pool.full_to_hisparse_device_index_mapping[0]),
        lambda pool: pool.full_to_hisparse_device_index_mapping[pool.full_to_hisparse_device_index_mapping > 0],
        lambda pool: pool.full_to_hisparse_device_index_mapping.tolist(),
    ],
    ids=["number by index", "tensor to the device", "number back", "mask", "list"],
)
def test_what_waits_is_seen(wait: Any, step: Callable[[], None], coordinator: SimpleNamespace) -> None:
    coordinator.mem_pool_device.transfer_values_on_device = lambda *_: wait(coordinator.mem_pool_device)
    with Watched(), pytest.raises(AssertionError, match="waits for the device"):
        step()
