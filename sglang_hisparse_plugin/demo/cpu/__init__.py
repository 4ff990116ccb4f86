"""What a machine without a GPU needs to run the real SGLang: stand-ins for kernels, and for nothing else.

Scheduler, batches, coordinator, allocators, pools and HTTP are SGLang's own. Replaced are only calls that need a GPU:
`sgl_kernel` (import stub; KV transfers byte by byte), streams and pinned memory (no-ops), the swap-in kernel
(`kernels.reference`), the DSA indexer and sparse attention (plain torch).

A test runs its scenario in a subprocess, one per release:

    env = cpu.environment(releases.fetch("0.5.12"))
    subprocess.run([sys.executable, "scenario.py"], env=env, check=True)

and there imports SGLang as on a GPU machine and passes `device="cpu"`. Child processes inherit the stand-ins.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Holds the `sitecustomize` that arms stand-ins and probes in every process of a server.
ON_PATH = Path(__file__).parents[1] / "path"


def environment(sglang: Path | None, base: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a process that runs SGLang on the CPU; a copy of `base` (default: this process's) with ours set.

    Args:
        sglang: a folder that holds the package `sglang` (see `releases.fetch`), or None for the installed one.
    """
    env = dict(os.environ if base is None else base)
    paths = [str(ON_PATH), *([str(sglang)] if sglang else []), *filter(None, [env.get("PYTHONPATH")])]
    return env | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",  # the wheel cache is shared between versions of Python
        "SGLANG_HISPARSE_DEMO_CPU": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_OPT_USE_TOPK_V2": "0",  # from 0.5.21: the top-k that has a stand-in, not the compiled one
        "TRITON_INTERPRET": "1",  # the allocators' Triton kernels run as written, interpreted
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # tensors here are tiny: threads that wait for each other cost more than they give
    }


def install() -> None:
    """Arm the stand-ins in this process; costs nothing until torch or SGLang is imported."""
    from . import hooks

    hooks.install()
