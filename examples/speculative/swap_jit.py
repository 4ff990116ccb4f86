"""Compiles kernels with nvcc through tvm-ffi alone, as SGLang's loaders do, where no SGLang can be imported.

It stands in for those loaders under the plugin's own build, and compiles the kernel that SGLang 0.5.22 and later have
for a verification from the sources of an unpacked wheel. Both get the flags that SGLang gives them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_hisparse_plugin.kernels import build

FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr"]
GATHER_THREADS = 64  # what SGLang launches its kernel with


def stand_in() -> None:
    """From now on the plugin's kernels are compiled here."""
    loader = SimpleNamespace(load_jit=_load_jit, make_cpp_args=lambda *numbers: ", ".join(map(str, numbers)))
    sys.modules[build.LOADERS[0]] = loader  # type: ignore[assignment]


def upstream_spec(root: Path, steps: int, top_k: int, hot: int, row_bytes: tuple[int, ...]) -> Any:
    """SGLang's kernel for a verification of `steps` queries: a module with one function `spec_N` for each row size.

    Args:
        root: the folder that holds the `sglang` of an unpacked wheel, 0.5.22 or later.
    """
    jit = root.resolve() / "sglang" / "kernels" / "jit"
    source = jit / "csrc" / "kvcacheio" / "hisparse_spec.cuh"
    if not source.is_file():
        raise FileNotFoundError(f"{source}: --sglang names no unpacked wheel of SGLang 0.5.22 or later")
    launched_early = "true" if torch.cuda.get_device_capability()[0] >= 9 else "false"
    exports = [
        (
            f"spec_{row}",
            "sglang::load_cache_to_device_buffer_spec<"
            f"{GATHER_THREADS}, {top_k}, {hot}, {row}, {steps}, false, {launched_early}>",
        )
        for row in row_bytes
    ]
    return _compile(f"upstream_spec_{steps}_{top_k}_{hot}", source, exports, [str(jit / "include")])


def in_parallel(jobs: list[Any]) -> None:
    """Run all of them; compilers are other processes."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _load_jit(*key: str, cuda_files: list[str], cuda_wrappers: list[tuple[str, str]]) -> Any:
    return _compile("_".join(key), Path(cuda_files[0]), cuda_wrappers, [])


def _compile(name: str, source: Path, exports: list[tuple[str, str]], includes: list[str]) -> Any:
    import tvm_ffi.cpp

    major, minor = _capability()
    arch = f"{major}.{minor}" + ("a" if major >= 9 else "")
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch
    lines = [f'#include "{source}"', "#include <tvm/ffi/function.h>"]
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({function}));" for export, function in exports]
    text = "\n".join(lines) + "\n"
    digest = hashlib.sha256((text + source.read_text() + arch).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / "sglang-hisparse-swap" / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "wrapper.cu"
    wrapper.write_text(text)
    flags = [*FLAGS, f"-DSGL_CUDA_ARCH={major}{minor}0"]
    return tvm_ffi.cpp.load(
        name=f"m{digest}",
        cuda_files=[str(wrapper)],
        extra_cuda_cflags=flags,
        extra_include_paths=includes,
        build_directory=str(folder),
    )


def _capability() -> tuple[int, int]:
    """Of this device; of an H200 where there is none and code is only compiled."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
