"""Every case runs on the torch op, and on the CUDA kernel in each shape where a GPU is present."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from sglang_hisparse_plugin.kernels import build, reference
from sglang_hisparse_plugin.kernels import swap_in as kernels

sys.path.insert(0, str(Path(__file__).parent))  # oracle, world

SHAPES = build.shapes(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else (build.Shape(0, 0, 0),)


@pytest.fixture(
    params=["reference", *(pytest.param(shape, marks=pytest.mark.gpu, id=shape.export) for shape in SHAPES)]
)
def op(request, monkeypatch):
    """A swap-in op."""
    if request.param == "reference":
        return reference.swap_in
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(build, "shape_for", lambda major, batch: request.param)
    return kernels.swap_in


@pytest.fixture
def device(op) -> str:
    return "cpu" if op is reference.swap_in else "cuda"


@pytest.fixture(autouse=True)
def prebuilt(monkeypatch):
    """HISPARSE_PREBUILT names a folder of modules compiled elsewhere, for a machine without SGLang."""
    folder = os.environ.get("HISPARSE_PREBUILT")
    if folder:
        import tvm_ffi

        monkeypatch.setattr(
            build,
            "swap_in_module",
            lambda top_k, hot, major: tvm_ffi.load_module(f"{folder}/swap_in_{top_k}_{hot}.so"),
        )
        monkeypatch.setattr(build, "copy_planned_module", lambda: tvm_ffi.load_module(f"{folder}/copy_planned.so"))
