"""What a machine without a GPU needs to run the real SGLang: stand-ins for what needs a GPU, listed in `STAND_INS`.

Scheduler, batches, coordinator, allocators, pools and HTTP are SGLang's own.

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

#: All that is not as on a GPU, by the module here, the variable or the server's flag that makes it so. The demo prints
#: it; a test compares it with the modules, the variables and the flags there are.
STAND_INS = {
    "attention": "sparse attention and the indexer's top-k: plain torch",
    "indexer": "the DSA indexer's forward pass: plain torch, without its Hadamard rotation",
    "swap_in": "the swap-in kernel, SGLang's and the plugin's alike: the package's reference in plain torch; SGLang's "
    "for a verification, from 0.5.22: plain torch, which chooses other rows to replace",
    "groups": "gather and scatter over ranks, for DP attention: SGLang's own methods by way of gloo, not its "
    "operators, which are registered for CUDA alone",
    "transfers": "KV copies between host and device, and the write of new rows into the MLA buffer: numpy and torch",
    "model_runner": "the construction of the HiSparse coordinator on 0.5.11 to 0.5.17, where SGLang's model runner "
    "does it only on CUDA: the demo builds SGLang's class with the arguments that SGLang would give it",
    "torch_cpu": "streams and events: complete at once; pinned and registered memory: ordinary memory; device "
    "capability: given as 9.0; AMX: given as absent",
    "speculative": "building and verifying chains of drafts: plain torch; other kernels of EAGLE: Triton, interpreted; "
    "the overlap scheduler, which SGLang switches off for them on a CPU from 0.5.16: on",
    "speculative_sampling": "verifying a chain of drafts by sampling: plain torch",
    "hooks": "sgl_kernel, flash_mla and other compiled kernels: stubs that fail when called; torchvision's operators: "
    "declared only",
    "SGLANG_USE_CPU_ENGINE": "SGLang's own CPU code where it has some",
    "SGLANG_OPT_USE_TOPK_V2": "from 0.5.21 the older of SGLang's two ways to the top-k, which has a stand-in",
    "TRITON_INTERPRET": "Triton kernels of the allocators: as written, interpreted",
    "TORCHDYNAMO_DISABLE": "torch.compile: off",
    "--disable-cuda-graph": "CUDA graphs: none",
}


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
        "TORCHDYNAMO_DISABLE": "1",  # dynamo cannot trace an interpreted Triton kernel
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # tensors here are tiny: threads that wait for each other cost more than they give
    }


def install() -> None:
    """Arm the stand-ins in this process; costs nothing until torch or SGLang is imported."""
    from . import hooks

    hooks.install()
