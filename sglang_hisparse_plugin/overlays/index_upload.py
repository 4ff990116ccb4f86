"""What a decode step sends to the device goes by way of pinned memory, and nobody waits for it to arrive."""

from __future__ import annotations

import ast
import sys
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .meanwhile import meanwhile
from .probing import existing, expect, expect_hookable, probe

METHOD = "_eager_backup_previous_token"
WAITS = "device_module.current_stream().wait_stream"
#: Host slots that the backup writes to.
SENT = ["host_locs.to(device=self.device)"]


@probe
def judge(tree: SourceTree) -> Verdict:
    backup = existing(upstream.coordinator_method(tree, METHOD), f"HiSparseCoordinator.{METHOD}")
    made = backup.calls("torch.tensor")
    lists = [ast.unparse(argument) for call in made for argument in call.args]
    expect(lists == ["backup_indices"], "torch.tensor(backup_indices, ...), once", "; ".join(lists) or "no such call")
    if not any(call.lineno < made[0].lineno for call in backup.all_calls() if ast.unparse(call.func) == WAITS):
        return Fixed("the stream that sends the list has not been told to wait for the forward pass")
    sent = [call for call in backup.all_calls() if isinstance(call.func, ast.Attribute) and call.func.attr == "to"]
    if _says(made[0], "pin_memory", "True"):
        late = [ast.unparse(call) for call in sent if not _says(call, "non_blocking", "True")]
        expect(bool(sent) and not late, ".to(..., non_blocking=True)", "; ".join(late) or "no such call")
        return Fixed("the list of positions is sent from pinned memory, and nobody waits for it")
    expect(_says(made[0], "device", "self.device"), "torch.tensor(..., device=self.device)", ast.unparse(made[0]))
    expect([ast.unparse(call) for call in sent] == SENT, SENT[0], f"{len(sent)} to(...)")
    expect_hookable(backup, "self", more=True)
    return Defective("a decode step sends a list by a stream that waits for the forward pass, and waits for it")


def _says(call: ast.Call, name: str, value: str) -> bool:
    return any(keyword.arg == name and ast.unparse(keyword.value) == value for keyword in call.keywords)


def backup_previous_token(original: Any, coordinator: Any, *args: Any, **kwargs: Any) -> Any:
    """The original, for which lists and free host slots come to the device without anybody waiting."""
    module, pool = sys.modules[upstream.COORDINATOR], coordinator.mem_pool_host
    torch, alloc = vars(module)["torch"], pool.alloc

    def sent(need_size: int) -> Any:
        slots = alloc(need_size)
        return None if slots is None else _send(slots.pin_memory(), coordinator.device)

    with meanwhile(module, torch=_Torch(torch)), meanwhile(pool, alloc=sent):
        return original(coordinator, *args, **kwargs)


class _Torch:
    """The module `torch`, but that a tensor made of a list for a device is sent there from pinned memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, values: list[int], *, dtype: Any, device: Any) -> Any:
        return _send(self._torch.tensor(values, dtype=dtype, pin_memory=True), device)


def _send(pinned: Any, device: Any) -> Any:
    """On its way there, in stream order. torch's allocator gives the pinned memory to nobody before it has arrived."""
    return pinned.to(device, non_blocking=True)


OVERLAY = Overlay(
    id="index-upload",
    symptom="every decode step waits for the forward pass of the step before, as if there were no overlap",
    why=(
        "To back up the last token of each request, a step makes a tensor on the device of a list of positions, and "
        "sends the host slots there. Both copy from pageable memory and wait for the scheduler's stream, which has "
        "just been told to wait for the forward pass. The hook has both sent from fresh pinned memory, in stream "
        "order. From 0.5.11 on the scheduler's stream waits for no pass, and to send them otherwise saves nothing."
    ),
    loses="the scheduler waits for the whole forward pass in every decode step",
    rows=("index-upload",),
    origin="sgl-project/sglang#37082",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    probe=judge,
    hooks=lambda tree: (Hook(existing(upstream.coordinator_method(tree, METHOD), "").target, backup_previous_token),),
)
