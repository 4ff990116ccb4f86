"""The pointer-chasing model as a folder that SGLang loads: a DeepSeek-V3.2 with `weights` that walk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .language import VOCABULARY
from .sizes import Dims
from .weights import EXPERTS, Draft, tensors


def config(dims: Dims) -> dict[str, Any]:
    """The `config.json` of DeepSeek-V3.2 with these sizes; its layers dense, their MLPs zero."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": dims.layers,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "index_head_dim": dims.index_head_dim,
        "index_n_heads": dims.index_heads,
        "index_topk": dims.index_topk,
        "initializer_range": 0.02,
        "intermediate_size": dims.intermediate,
        "kv_lora_rank": dims.kv_lora_rank,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": dims.intermediate,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": dims.heads,
        "num_experts_per_tok": 4,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": dims.q_lora_rank,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "qk_rope_head_dim": dims.rope,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": dims.v_head_dim,
        "vocab_size": VOCABULARY,
    }


def folder(right: Path, draft: Draft | None) -> Path:
    """Where the model with `draft` is kept beside the right one; None: without speculative decoding."""
    return right if draft in {None, Draft.RIGHT} else right.with_name(f"{right.name}-draft-{draft.name.lower()}")


def write(folder: Path, dims: Dims, draft: Draft = Draft.RIGHT) -> Path:
    """Write `config.json` and `model.safetensors` into `folder` (made if missing) and return it.

    Raises:
        OSError: the folder cannot be made or written to, or the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(dims), indent=1))
    try:
        save_file(tensors(dims, draft), str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return folder
