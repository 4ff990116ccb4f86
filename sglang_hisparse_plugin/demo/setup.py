"""How a server is started: the flags and environment that an SGLang, a device and a variant need."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .. import config
from . import cpu, model
from .scales import Scale
from .server import Progress, Server
from .weights import Draft


@dataclass(frozen=True)
class Target:
    """The SGLang under test."""

    name: str
    root: Path
    """Holds the package `sglang`."""


@dataclass(frozen=True)
class Variant:
    """How the servers of a demo run; what is left out is how SGLang's users run it most."""

    draft_tokens: int = 3
    """Tokens verified at once, where a server speculates: the last one and `draft_tokens - 1` drafts."""
    overlap: bool = True
    """The overlap scheduler."""
    cuda_graphs: bool = True
    kv_dtype: str = "bfloat16"

    def __str__(self) -> str:
        overlap, graphs = ("on" if on else "off" for on in (self.overlap, self.cuda_graphs))
        return f"{self.draft_tokens} draft tokens, overlap {overlap}, CUDA graphs {graphs}, {self.kv_dtype} KV"


BACKENDS = {"bfloat16": "flashmla_sparse", "fp8_e4m3": "flashmla_kv"}  #: of sparse attention, by KV dtype


@dataclass(frozen=True)
class Launcher:
    """Starts servers of one SGLang on one device."""

    target: Target
    scale: Scale
    model: Path
    """Folder of the model; those with wrong drafts are beside it, see `model.folder`."""
    work: Path
    """Folder for logs."""
    progress: Progress
    variant: Variant = Variant()
    tp: int = 1
    """Tensor-parallel ranks."""
    dp: int = 1
    """With DP attention as many of them as have requests of their own; all, or 1: without."""
    pp: int = 1
    """Pipeline stages."""

    def server(
        self,
        name: str,
        *,
        hisparse: bool = True,
        plugin: str = "auto",
        skip: str = "",
        retract: bool = False,
        draft: Draft | None = None,
    ) -> Server:
        """A server, not yet started.

        Args:
            name: of its log file.
            plugin: the plugin's mode.
            skip: overlays left out, separated by commas.
            retract: SGLang's own test switch: retract a request every `retract_every` forward passes.
            draft: speculative decoding with this next-token layer; None: without.
        """
        env = self._environment() | {config.MODE_VARIABLE: plugin, config.SKIP_VARIABLE: skip}
        if retract:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(self.scale.retract_every)}
        if draft and "SGLANG_ENABLE_SPEC_V2" in self._source("environ.py"):  # until 0.5.12 a choice
            env["SGLANG_ENABLE_SPEC_V2"] = str(int(self.variant.overlap))
        server = Server(
            self._command(hisparse, draft),
            env,
            self.work / f"{self.target.name}-{name}.log",
            self.scale.patience,
            lambda text: self.progress(f"{name}: {text}"),
        )
        server.stages = self.pp
        return server

    def _environment(self) -> dict[str, str]:
        if self.scale.device == "cpu":
            env = cpu.environment(self.target.root)
            stages = self.pp if "init_threads_binding" in self._source("utils/numa_utils.py") else 1  # earlier, of one
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * self.tp * stages)  # unset: a NUMA node for each rank
        else:
            env = dict(os.environ, SGLANG_DISABLE_VERSION_CHECK="1", SGLANG_JIT_DEEPGEMM_PRECOMPILE="0")
            # Without HiSparse a short prompt would take a dense kernel, which the sparse walks are not compared with.
            env |= {f"SGLANG_{name}_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0" for name in ("NSA", "DSA")}
            paths = [str(cpu.ON_PATH), str(self.target.root), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS"] = "0"  # a control's server that dies would wait a minute
        return env | {"SGLANG_HISPARSE_DEMO_PROBE": "1", "HF_HUB_OFFLINE": "1"}

    def _command(self, hisparse: bool, draft: Draft | None = None) -> list[str]:
        scale, variant = self.scale, self.variant
        command = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model.folder(self.model, draft)}"]
        command += ["--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--disable-radix-cache"]
        command += ["--grammar-backend=none", "--sampling-backend=pytorch", "--dtype=bfloat16"]
        command += [f"--kv-cache-dtype={variant.kv_dtype}", "--page-size=64", f"--context-length={scale.context}"]
        command += [f"--max-total-tokens={scale.device_tokens}", f"--max-running-requests={scale.slots}"]
        command += ["--mem-fraction-static=0.5", *self._renamed_flags()]
        if scale.device == "cpu":
            command += ["--device=cpu"]
        if scale.device == "cpu" or not variant.cuda_graphs:
            command += ["--disable-cuda-graph"]
        if not variant.overlap:
            command += ["--disable-overlap-schedule"]
        if self.tp > 1:
            command += self._parallelism()
        if self.pp > 1:
            command += [f"--pp-size={self.pp}"]
        if draft:
            command += self._speculation()
        if hisparse:
            sizes = {"top_k": scale.dims.index_topk, "device_buffer_size": scale.hot_buffer, "host_to_device_ratio": 2}
            command += ["--enable-hisparse", f"--hisparse-config={json.dumps(sizes)}"]
        return command

    def _speculation(self) -> list[str]:
        tokens = self.variant.draft_tokens
        flags = ["--speculative-algorithm=EAGLE", "--speculative-eagle-topk=1"]
        flags += [f"--speculative-num-steps={tokens - 1}", f"--speculative-num-draft-tokens={tokens}"]
        if self.scale.device == "cuda":
            flags.append("--moe-runner-backend=triton")  # of the next-token layer; others do not take so small a one
        chosen = re.search(r"def _config_draft_model\(.*?(?=\n    def )", self._source("configs/model_config.py"), re.S)
        if chosen and "DeepseekV32ForCausalLM" not in chosen[0]:  # until 0.5.11 it finds V3.2's next-token layer so
            flags.append('--json-model-override-args={"architectures": ["DeepseekV3ForCausalLM"]}')
        return flags

    def _parallelism(self) -> list[str]:
        """Sums over ranks by NCCL or gloo alone: SGLang's other ways need kernels and links that not every host has."""
        flags = [f"--tp-size={self.tp}", "--disable-custom-all-reduce"]
        if self.dp > 1:
            flags += [f"--dp-size={self.dp}", "--enable-dp-attention"]
        return [*flags, "--enforce-disable-flashinfer-allreduce-fusion"]

    def _renamed_flags(self) -> list[str]:
        """Flags that changed names between releases, as this one spells them; NSA became DSA in 0.5.15."""
        known = self._flags_source()
        dsa = "dsa" if "dsa_prefill_backend" in known else "nsa"
        flags = [f"--attention-backend={dsa}"]
        flags += [f"--{dsa}-{phase}-backend={BACKENDS[self.variant.kv_dtype]}" for phase in ("prefill", "decode")]
        if self.scale.device == "cuda":
            renamed = "cuda_graph_max_bs_decode" in known
            flags.append(f"--cuda-graph-max-bs{'-decode' if renamed else ''}={self.scale.slots}")
        return flags

    def _flags_source(self) -> str:
        srt = self.target.root / "sglang" / "srt"
        files = [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]
        return "\n".join(file.read_text("utf-8") for file in files if file.is_file())

    def _source(self, name: str) -> str:
        file = self.target.root / "sglang" / "srt" / name
        return file.read_text("utf-8") if file.is_file() else ""
