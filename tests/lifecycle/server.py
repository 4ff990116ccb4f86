"""The real start of a scheduler process, up to the point where its event loop would begin.

Everything is SGLang's own: arguments, configuration, distributed groups, model runner, pools, coordinator, scheduler.
Absent are a model (`models.absent`) and an attention backend; `sglang_hisparse_plugin.demo.cpu` stands in for the GPU.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

PAGE, TOP_K, HOT_BUFFER, DEVICE_TOKENS, RATIO, SLOTS, CHUNK = 64, 64, 128, 1024, 2, 4, 512
VOCABULARY = 32000

MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 1,
    "index_head_dim": 128,
    "index_topk": TOP_K,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


class Started(BaseException):
    """Ends `run_scheduler_process` with the scheduler it built; no `Exception`, which it would report and swallow."""


def environment(sglang: Path) -> dict[str, str]:
    """What `start` needs besides the stand-ins: no model but the absent one, and one thread, so that forks are safe."""
    models = [m.name for m in pkgutil.iter_modules([str(sglang / "sglang" / "srt" / "models")])]
    return {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": f"{__package__}.models",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(models),
        "OMP_NUM_THREADS": "1",
    }


def start(*extra: str, rank: int = 0, group: int | None = None, stage: int = 0):
    """The scheduler of this process, built as `run_scheduler_process` builds it; `extra` are more server arguments.

    `rank` is its tensor-parallel rank, for which `extra` must say how many there are and where they meet; `group` is
    that of its DP attention, `stage` that of its pipeline.
    """
    import torch

    torch.set_num_threads(1)
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import PortArgs, prepare_server_args

    server_args = prepare_server_args([*_arguments(), *extra])
    _without_attention()

    def captured(scheduler):
        raise Started(scheduler)

    module.Scheduler.get_init_info = captured
    _die_instead_of_signalling_the_parent()
    known = {
        "server_args": server_args,
        "port_args": PortArgs.init_new(server_args),
        "pipe_writer": SimpleNamespace(send=None),
        "dp_rank": group,
        "tp_rank": rank,
        "pp_rank": stage,
    }
    names = inspect.signature(module.run_scheduler_process).parameters
    try:
        module.run_scheduler_process(**{n: known.get(n, 0) for n in names if not n.startswith("display_")})
    except Started as started:
        return started.args[0]
    raise AssertionError("run_scheduler_process came back without a scheduler")


def _arguments() -> list[str]:
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(MODEL))
    hisparse = {"top_k": TOP_K, "device_buffer_size": HOT_BUFFER, "host_to_device_ratio": RATIO}
    values = {
        "model-path": model,
        "device": "cpu",
        "load-format": "dummy",
        "hisparse-config": json.dumps(hisparse),
        "page-size": PAGE,
        "max-total-tokens": DEVICE_TOKENS,
        "max-running-requests": SLOTS,
        "chunked-prefill-size": CHUNK,
        "context-length": 2048,
        "mem-fraction-static": 0.5,
        "attention-backend": "nsa",
        "sampling-backend": "pytorch",
        "log-level": "warning",
    }
    flags = ["--enable-hisparse", "--disable-radix-cache", "--skip-tokenizer-init", "--disable-cuda-graph"]
    return [*flags, *(part for k, v in values.items() for part in (f"--{k}", str(v)))]


def _without_attention() -> None:
    from sglang.srt.model_executor import model_runner

    from sglang_hisparse_plugin.demo.cpu import model_runner as stand_in

    if hasattr(model_runner.ModelRunner, "init_attention_backend"):
        model_runner.ModelRunner.init_attention_backend = lambda runner: setattr(runner, "attn_backend", None)
        stand_in.adapt(model_runner)
    else:
        result = inspect.signature(model_runner.build_attention_backends).return_annotation
        kind = getattr(sys.modules[model_runner.build_attention_backends.__module__], str(result).split(".")[-1])
        nothing = dict.fromkeys(kind.__annotations__)
        model_runner.build_attention_backends = lambda **_: SimpleNamespace(**nothing)


def _die_instead_of_signalling_the_parent() -> None:
    import psutil

    class Process(psutil.Process):
        def parent(self):
            return self

        def send_signal(self, signal):
            sys.stderr.flush()
            os._exit(1)

    psutil.Process = Process
