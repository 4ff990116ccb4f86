"""What is served on which device, and how the server is started for it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .. import config
from . import cpu, model
from .server import Progress, Server


@dataclass(frozen=True)
class Scale:
    """Sizes of a demo; all lengths in tokens."""

    device: str
    dims: model.Dims
    hot_buffer: int
    """Slots per request on the device, without the page for the newest token."""
    device_tokens: int
    """Slots of the device pool; the logical and host pools hold twice as many."""
    slots: int
    """--max-running-requests."""
    long: tuple[int, ...]
    """Lengths of the prompts walked one at a time."""
    crowd: tuple[int, int]
    """Shortest and longest of the prompts walked together."""
    crowd_size: int
    """How many; more than slots."""
    steps: int
    """Tokens of a long walk; more than a lap."""
    crowd_steps: int
    retract_every: int
    """Forward passes from one forced retraction to the next."""
    patience: float
    """Seconds until a server must be ready."""

    @property
    def context(self) -> int:
        """--context-length."""
        return max(*self.long, self.crowd[1]) + self.steps + 64


CPU = Scale(
    device="cpu",
    dims=model.CPU,
    hot_buffer=128,
    device_tokens=4096,
    slots=4,
    long=(1500, 1000),
    crowd=(500, 900),
    crowd_size=9,
    steps=140,
    crowd_steps=80,
    retract_every=12,
    patience=240,
)
CUDA = Scale(
    device="cuda",
    dims=model.CUDA,
    hot_buffer=4096,
    device_tokens=131072,
    slots=8,
    long=(32000, 20000),
    crowd=(9000, 16000),
    crowd_size=14,
    steps=200,
    crowd_steps=200,
    retract_every=40,
    patience=420,
)
SCALES = {scale.device: scale for scale in (CPU, CUDA)}


@dataclass(frozen=True)
class Target:
    """The SGLang under test."""

    name: str
    root: Path
    """Holds the package `sglang`."""


@dataclass(frozen=True)
class Launcher:
    """Starts servers of one SGLang on one device."""

    target: Target
    scale: Scale
    model: Path
    """Folder of the model."""
    work: Path
    """Folder for logs."""
    progress: Progress

    def server(
        self, name: str, *, hisparse: bool = True, plugin: str = "auto", skip: str = "", retract: bool = False
    ) -> Server:
        """A server, not yet started.

        Args:
            name: of its log file.
            plugin: the plugin's mode.
            skip: overlays left out, separated by commas.
            retract: SGLang's own test switch: retract a request every `retract_every` forward passes.
        """
        env = self._environment() | {config.MODE_VARIABLE: plugin, config.SKIP_VARIABLE: skip}
        if retract:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(self.scale.retract_every)}
        return Server(
            self._command(hisparse),
            env,
            self.work / f"{self.target.name}-{name}.log",
            self.scale.patience,
            lambda text: self.progress(f"{name}: {text}"),
        )

    def _environment(self) -> dict[str, str]:
        if self.scale.device == "cpu":
            env = cpu.environment(self.target.root)
        else:
            env = dict(os.environ, SGLANG_DISABLE_VERSION_CHECK="1", SGLANG_JIT_DEEPGEMM_PRECOMPILE="0")
            # Without HiSparse a short prompt would take a dense kernel, which the sparse walks are not compared with.
            env |= {f"SGLANG_{name}_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0" for name in ("NSA", "DSA")}
            paths = [str(cpu.ON_PATH), str(self.target.root), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        return env | {"SGLANG_HISPARSE_DEMO_PROBE": "1", "HF_HUB_OFFLINE": "1"}

    def _command(self, hisparse: bool) -> list[str]:
        scale = self.scale
        command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={self.model}"]
        command += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--disable-radix-cache"]
        command += ["--grammar-backend=none", "--sampling-backend=pytorch", "--dtype=bfloat16"]
        command += ["--kv-cache-dtype=bfloat16", "--page-size=64", f"--context-length={scale.context}"]
        command += [f"--max-total-tokens={scale.device_tokens}", f"--max-running-requests={scale.slots}"]
        command += ["--mem-fraction-static=0.5", *self._renamed_flags()]
        if scale.device == "cpu":
            command += ["--device=cpu", "--disable-cuda-graph"]
        if hisparse:
            sizes = {"top_k": scale.dims.index_topk, "device_buffer_size": scale.hot_buffer, "host_to_device_ratio": 2}
            command += ["--enable-hisparse", f"--hisparse-config={json.dumps(sizes)}"]
        return command

    def _renamed_flags(self) -> list[str]:
        """Flags that changed names between releases, as this one spells them; NSA became DSA in 0.5.15."""
        known = self._flags_source()
        dsa = "dsa" if "dsa_prefill_backend" in known else "nsa"
        flags = [f"--attention-backend={dsa}"]
        flags += [f"--{dsa}-{phase}-backend=flashmla_sparse" for phase in ("prefill", "decode")]
        if self.scale.device == "cuda":
            renamed = "cuda_graph_max_bs_decode" in known
            flags.append(f"--cuda-graph-max-bs{'-decode' if renamed else ''}={self.scale.slots}")
        return flags

    def _flags_source(self) -> str:
        srt = self.target.root / "sglang" / "srt"
        files = [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]
        return "\n".join(file.read_text("utf-8") for file in files if file.is_file())
