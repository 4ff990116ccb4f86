"""Compiles the CUDA sources through SGLang's own JIT loader, and says which instance serves which batch."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

# Where the releases keep `load_jit` and `make_cpp_args`; newest first.
LOADERS = ("sglang.kernels.jit.utils", "sglang.jit_kernel.utils")


class Shape(NamedTuple):
    """How a request is spread over the chip: `cluster` blocks of `threads` threads, each with `in_flight` loads."""

    cluster: int
    threads: int
    in_flight: int

    @property
    def export(self) -> str:
        return f"swap_in_{self}"

    @property
    def shared_bytes_export(self) -> str:
        return f"shared_bytes_{self}"

    def __str__(self) -> str:
        return "x".join(map(str, self))


# By compute capability: (largest batch, shape), ascending; None: any. Clusters need 9.0, one block is always right.
# 9.0 was measured on an H200 with 132 multiprocessors (docs/swap_in.md). 10.x uses the same until it is measured.
ONE_BLOCK = ((None, Shape(1, 1024, 4)),)
HOPPER = ((8, Shape(8, 512, 4)), (16, Shape(4, 512, 4)), (32, Shape(2, 512, 4)), (None, Shape(1, 512, 4)))
TUNING: dict[int, tuple[tuple[int | None, Shape], ...]] = {9: HOPPER, 10: HOPPER}
COPY_THREADS = 512


class CompilerMissing(RuntimeError):
    """The CUDA kernel cannot be built here; the message names what is missing."""


class TooLittleSharedMemory(ValueError):
    """The tables of this top_k and hot buffer do not fit in a thread block of this device; the message has sizes."""


def shape_for(capability_major: int, batch: int) -> Shape:
    """The instance that serves `batch` requests on a device of this compute capability."""
    table = TUNING.get(capability_major, ONE_BLOCK)
    return next(shape for limit, shape in table if limit is None or batch <= limit)


def shapes(capability_major: int) -> tuple[Shape, ...]:
    """Every instance that :func:`shape_for` can name."""
    return tuple(dict.fromkeys(shape for _, shape in TUNING.get(capability_major, ONE_BLOCK)))


def source_root() -> Path:
    """`csrc`: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "csrc", package.parent / "csrc"):
        if (root / "hisparse" / "launch.cuh").is_file():
            return root
    raise CompilerMissing(f"the CUDA sources are missing: neither {package}/csrc nor {package.parent}/csrc holds them")


@functools.cache
def source_digest() -> str:
    """Changes with any source file: older loaders key their cache by the path of the sources, not by their text."""
    digest = hashlib.sha256()
    for path in sorted(source_root().rglob("*.*h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def swap_in_module(num_top_k: int, hot_buffer_size: int, capability_major: int) -> Any:
    """The compiled module with two exports per shape; compiled at first use, then from the loader's cache."""
    jit = loader()
    exports = [
        (export, _template(jit, function, num_top_k, hot_buffer_size, *shape))
        for shape in shapes(capability_major)
        for export, function in ((shape.export, "swap_in"), (shape.shared_bytes_export, "shared_bytes"))
    ]
    return _build(jit, "swap_in", (num_top_k, hot_buffer_size), exports)


def check_shared_memory(
    module: Any, num_top_k: int, hot_buffer_size: int, capability_major: int, available: int
) -> None:
    """Raise :class:`TooLittleSharedMemory` unless a block that may have `available` bytes can run every shape."""
    needed = max(getattr(module, shape.shared_bytes_export)() for shape in shapes(capability_major))
    if needed > available:
        raise TooLittleSharedMemory(
            f"top_k {num_top_k} with a hot buffer of {hot_buffer_size} slots needs {needed} bytes of shared memory "
            f"in a thread block, and this device has {available}: make the hot buffer smaller"
        )


@functools.cache
def copy_planned_module() -> Any:
    """The compiled module that exports `copy_planned`."""
    jit = loader()
    return _build(jit, "copy_planned", (), [("copy_planned", _template(jit, "copy_planned", COPY_THREADS))])


def find_nvcc() -> str | None:
    """The CUDA compiler the loader would run, or None."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.path.join(home, "bin", "nvcc") for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for found in map(shutil.which, candidates) if found), None)


def loader() -> Any:
    """SGLang's JIT utilities."""
    for name in LOADERS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise CompilerMissing(f"SGLang's JIT loader {name} needs {error.name}") from error
    raise CompilerMissing("this SGLang has no JIT loader (looked for " + " and ".join(LOADERS) + ")")


def _template(jit: Any, function: str, *arguments: int) -> str:
    return f"::hisparse_plugin::{function}<{jit.make_cpp_args(*arguments)}>"


def _build(jit: Any, name: str, key: tuple[int, ...], exports: list[tuple[str, str]]) -> Any:
    source = str(source_root() / "hisparse" / "launch.cuh")
    return jit.load_jit(
        f"hisparse_plugin_{name}", *map(str, key), source_digest(), cuda_files=[source], cuda_wrappers=exports
    )
