"""Every shape that the tuning can ask for compiles for its architectures, and through SGLang's loaders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import cpu, releases
from sglang_hisparse_plugin.kernels import build

NVCC = build.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc, the CUDA compiler")
DEPLOYED = (2048, 4096)


def cuda_home() -> Path:
    """The folder of the toolkit: what nvcc says it is, for the one on PATH may be a wrapper."""
    said = subprocess.run([NVCC, "--dryrun", "-c", "none.cu"], capture_output=True, text=True, check=False).stderr
    top = next(line.partition("TOP=")[2] for line in said.splitlines() if "TOP=" in line)
    return Path(top.strip()).resolve()


LOAD = """
import sys, sglang_hisparse_plugin.kernels.build as build
jit = build.loader()
with jit.override_jit_cuda_arch(8, 0, ""):
    module = build.swap_in_module(64, 128, 8)
    print(getattr(module, build.shape_for(8, 1).export), build.copy_planned_module().copy_planned)
    build.check_shared_memory(module, 64, 128, 8, 100 << 10)
    try:
        build.check_shared_memory(module, 64, 128, 8, 1 << 10)
    except build.TooLittleSharedMemory as refused:
        print(refused)
"""


@needs_nvcc
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("80", DEPLOYED),
        ("90a", DEPLOYED),
        ("100a", DEPLOYED),
        ("120", DEPLOYED),
        ("89", (2048, 8192)),
        ("90a", (2048, 24000)),
    ],
)
def test_compiles_for(arch: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """To machine code, with no warning; register spills stay within a few words of a thread.

    Beside the deployed sizes, buffers whose tables just do not fit in shared memory: a block must not ask for more.
    """
    import tvm_ffi.libinfo

    number = arch.rstrip("a")
    shapes = build.shapes(int(number) // 10)
    source = tmp_path / "all.cu"
    source.write_text(
        f'#include "{build.source_root() / "hisparse" / "launch.cuh"}"\n'
        + "".join(
            f"auto shape_{i} = &hisparse_plugin::swap_in<{', '.join(map(str, (*sizes, *shape)))}>;\n"
            for i, shape in enumerate(shapes)
        )
        + f"auto planned = &hisparse_plugin::copy_planned<{build.COPY_THREADS}>;\n"
    )
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-DSGL_CUDA_ARCH={number}0", "-Xptxas=-v", "-cubin"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}", *(f"-I{path}" for path in includes)]
    command = [NVCC, *flags, str(source), "-o", str(tmp_path / "all.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr
    spilled = [
        int(line.split(" bytes spill stores")[0].split()[-1]) for line in done.stderr.splitlines() if "spill" in line
    ]
    assert len(spilled) == len(shapes) + 1
    assert max(spilled) <= 64


@needs_nvcc
@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.23"])
def test_builds_through_sglangs_loader(release: str, tmp_path: Path) -> None:
    """The oldest and the newest loader compile, link and open the modules; for sm_80, which has one shape."""
    env = cpu.environment(releases.fetch(release))
    env |= dict.fromkeys(("XDG_CACHE_HOME", "TVM_FFI_CACHE_DIR", "SGLANG_JIT_CACHE_DIR"), str(tmp_path))
    home = cuda_home()
    env["CUDA_HOME"] = str(home)
    for name in ("LIBRARY_PATH", "LD_LIBRARY_PATH"):  # the loaders look in lib64 alone
        env[name] = os.pathsep.join([str(home / "lib64"), str(home / "lib"), env.get(name, "")])
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Function") == 2, done.stdout
    assert "top_k 64 with a hot buffer of 128 slots needs " in done.stdout
    assert "this device has 1024: make the hot buffer smaller" in done.stdout
