"""Gather and scatter over ranks, for DP attention: SGLang's operators, which are registered for CUDA alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adapt(module: ModuleType) -> None:
    """Replace the operators by the methods of SGLang's that they call, which take gloo."""

    def gather(output: Any, input: Any, group_name: str) -> None:
        module._groups[group_name]()._all_gather_into_tensor(output, input)

    def scatter(output: Any, input: Any, group_name: str) -> None:
        module._groups[group_name]()._reduce_scatter_tensor(output, input)

    module.reg_all_gather_into_tensor, module.reg_reduce_scatter_tensor = gather, scatter  # type: ignore[attr-defined]
