"""The whole command in environments of every kind, and facts of a machine on which nothing is wrong."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hisparse_plugin.doctor import examine, launch, sandbox
from sglang_hisparse_plugin.doctor.table import PROBES

CHECKOUT = Path(__file__).parents[2]
RELEASE = "0.5.12"
#: Nothing but the package's folder: no site-packages, no environment variables of Python.
BARE = "import sys; sys.path[:0] = {paths!r}; from sglang_hisparse_plugin.cli import main; sys.exit(main(sys.argv[1:]))"
DSA = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_head_dim": 128,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
}
LAUNCH = [
    *("python", "-m", "sglang.launch_server", "--model-path", "/models/dsa", "--tp", "8", "--enable-hisparse"),
    *("--disable-radix-cache", "--hisparse-config", '{"device_buffer_size": 4096, "host_to_device_ratio": 4}'),
]


@dataclass
class Ran:
    """What the command said."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out)

    def findings(self, probe: str) -> list[tuple[str, str]]:
        return [(f["level"], f["what"]) for f in self.report["findings"] if f["probe"] == probe]


def doctor(*arguments: str, paths: tuple[Path, ...] = (), env: Mapping[str, str] | None = None, **more: Any) -> Ran:
    """``doctor --json`` in a Python that sees the package and `paths`, and nothing else that is not built in."""
    code = BARE.format(paths=[*map(str, paths), str(CHECKOUT)])
    command = [sys.executable, "-S", "-I", "-c", code, "doctor", "--json", *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp"), **(env or {})}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, **more)
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def package(folder: Path, name: str, source: str) -> Path:
    """A stub package `name` in `folder`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


def program(folder: Path, name: str, script: str) -> str:
    """An executable shell script; the PATH that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


GIB = 1 << 30
GPUS = [
    {
        "index": i,
        "uuid": f"GPU-{i}{i}{i}",
        "name": "NVIDIA H200",
        "capability": "9.0",
        "memory_mib": 143771,
        "used_mib": 0,
        "driver": "580.65.06",
        "bus": f"0000:{i}b:00.0",
        "gen": 1,
        "gen_max": 5,
        "width": 16,
        "width_max": 16,
        "mig": "Disabled",
        "node": i // 4,
    }
    for i in range(8)
]
#: As the probes would gather them on a node with eight H200 and 0.5.12; written by hand, not measured.
HEALTHY: dict[str, Any] = {
    "python": {
        "version": "3.12.3",
        "executable": "/venv/bin/python",
        "platform": "Linux",
        "plugin": "0.1.0",
        "package": "/venv/lib/sglang_hisparse_plugin",
        "installed": {"/venv/lib": "0.1.0"},
        "entry_point": True,
        "entry_points_problem": "",
        "pth": True,
        "missing": [],
        "server_program": "python",
        "same_interpreter": True,
        "server_found": True,
        "server_pythonpath": None,
        "pythonpath": None,
    },
    "sglang": {
        "version": "0.5.12",
        "root": "/venv/lib",
        "has_loader": True,
        "has_hisparse": True,
        "lacks_hisparse": False,
        "requires_python": ">=3.10",
        "unmet": [],
        "architectures": {"dsa": ["DeepseekV32ForCausalLM"], "other": ["DeepseekV4ForCausalLM"]},
        "backends_by_dtype": {"bfloat16": ["flashmla_sparse"], "fp8_e4m3": ["flashmla_kv"]},
        "top_k_from_model": True,
        "mixed_chunk_refused": False,
        "takes_tokens": True,
        "speculative": False,
        "block_size": False,
    },
    "torch": {
        "module": "torch",
        "version": "2.11.0+cu130",
        "path": "/venv/lib/torch/__init__.py",
        "cuda": "13.0",
        "hip": None,
        "available": True,
        "devices": 8,
        "architectures": ["sm_80", "sm_90", "sm_100"],
        "warnings": [],
    },
    "import sglang": {"module": "sglang", "version": "0.5.12", "path": "/venv/lib/sglang/__init__.py"},
    "sgl_kernel": {"module": "sgl_kernel", "version": "0.4.2", "path": "/venv/lib/sgl_kernel/__init__.py"},
    "tvm_ffi": {"module": "tvm_ffi", "version": "0.1.9", "path": "/venv/lib/tvm_ffi/__init__.py"},
    "overlays": {
        "mode": "auto",
        "allowed": True,
        "skip": [],
        "overlays": {
            "swap-in": {"outcome": "applied", "reason": "slow"},
            "mixed-chunk": {"outcome": "applied", "reason": "ends the server"},
        },
        "targets": {"sglang.jit_kernel.hisparse:load_cache_to_device_buffer_mla": "swap-in"},
    },
    "other plugins": {"plugins": {}},
    "toolchain": {
        "nvcc": "/usr/local/cuda/bin/nvcc",
        "nvcc_release": "13.0",
        "nvcc_says": "release 13.0",
        "cuda_home": "/usr/local/cuda",
        "home_nvcc": True,
        "cudart": True,
        "cudart_elsewhere": None,
        "compiler": "/usr/bin/c++",
        "compiler_wanted": "c++",
        "compiler_says": "c++ 13",
        "ninja": "/usr/bin/ninja",
    },
    "caches": {
        "folders": [{"purpose": "compiled kernels", "variable": "V", "path": "/root/.cache", "free_bytes": 90 * GIB}]
    },
    "gpu": {
        "gpus": GPUS,
        "smi_problem": "",
        "visible": None,
        "nodes": {
            "0": {"cpus": "0-63", "free_bytes": 900 * GIB, "total_bytes": 1024 * GIB},
            "1": {"cpus": "64-127", "free_bytes": 900 * GIB, "total_bytes": 1024 * GIB},
        },
        "cpus": list(range(128)),
    },
    "memory": {
        "total_bytes": 2048 * GIB,
        "available_bytes": 1900 * GIB,
        "memlock_bytes": None,
        "memlock_hard_bytes": None,
        "may_lock_all": True,
        "cgroup": None,
    },
    "model": {
        "name": "/models/dsa",
        "folder": "/models/dsa",
        "architectures": DSA["architectures"],
        "config": {key: value for key, value in DSA.items() if key != "architectures"},
        "weights_bytes": 640 * GIB,
        "missing": 0,
        "first_missing": [],
    },
    "launch command": {"given": True, "options": {}, "environment": {}},
    "transfer": {
        "register_code": 0,
        "registered_bytes": 256000000,
        "memlock_bytes": None,
        "devices": [
            {
                "index": 0,
                "name": "NVIDIA H200",
                "bus": "0000:0b:00.0",
                "gbps": 55.1,
                "gbps_spread": [55.0, 55.2],
                "copies": 50,
                "link_after": {"gen": 5, "gen_max": 5, "width": 16, "width_max": 16, "node": 0},
            }
        ],
    },
}


def judged(
    changes: Mapping[str, Any] | None = None, words: list[str] = LAUNCH, failures: Mapping[str, str] | None = None
) -> examine.Examination:
    """The healthy machine's facts with `changes`: "probe.key.key" -> value; a list index is a key, too."""
    facts = copy.deepcopy(HEALTHY)
    for path, value in (changes or {}).items():
        *way, last = path.split(".")
        place: Any = facts
        for key in way:
            place = place[int(key) if isinstance(place, list) else key]
        place[int(last) if isinstance(place, list) else last] = value
    outcomes = {name: sandbox.Outcome(value=value) for name, value in facts.items()}
    outcomes.update({name: sandbox.Outcome(failure=failure) for name, failure in (failures or {}).items()})
    return examine.judge(examine.Examined(examine.Subject(launch.read(words)), outcomes), PROBES)
