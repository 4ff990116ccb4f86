"""What sizes follow from: the shape of a model, the HiSparse flags, and a release. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .error import SizingError
from .hisparse import HiSparse

__all__ = ["HiSparse", "ModelShape", "Server", "SizingError", "version"]

#: Bytes per element of the latent KV row, by --kv-cache-dtype.
KV_DTYPES = ("bfloat16", "fp8_e4m3")
#: In fp8 rows, each group of this many latent elements has a float32 scale, and the rope part stays bfloat16.
QUANT_BLOCK = 128
NEWEST = "0.5.23"
#: Far above any model's; what is larger is a mistake, and would be reckoned with for hours.
MOST_LAYERS, MOST_WIDTH, MOST_TOKENS = 10_000, 1_000_000, 1_000_000_000
#: Architectures whose cache is laid out as in DeepSeek-V3.2 (is_deepseek_dsa), and beginnings of those that are not.
COVERED = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
NOT_COVERED = ("DeepseekV4", "MiniMaxM3")


def version(release: str) -> tuple[int, ...]:
    """(0, 5, 10) of "0.5.10.post1": posts and local parts change no size.

    Raises:
        SizingError: `release` is no version.
    """
    if not (found := re.match(r"(\d+)\.(\d+)\.(\d+)", release)):
        raise SizingError(f"{release!r} is no release of SGLang: give one such as {NEWEST}")
    return tuple(map(int, found.groups()))


@dataclass(frozen=True)
class ModelShape:
    """What a ``config.json`` of a model with DeepSeek Sparse Attention says of its KV cache."""

    layers: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    shared_index: tuple[bool, ...] = ()
    """Per layer, whether it takes the previous layer's top-k; empty for none."""
    draft_layers: int = 0
    """Next-token-prediction layers."""
    max_context: int | None = None
    """Longest request that SGLang takes by itself; None where the configuration does not say."""
    name: str = "numbers given by hand"
    heads: int | None = None
    """Attention heads, which tensor parallelism divides; None where the configuration does not say."""

    def row_bytes(self, kv_dtype: str) -> int:
        """Bytes of one token's KV row in one layer: 1152 in bfloat16 and 656 in fp8 for DeepSeek-V3.2.

        As calculate_mla_kv_cache_dim of SGLang (0.5.10: ModelRunnerKVCacheMixin; 0.5.23: kv_cache_configurator.py).
        """
        if kv_dtype == "bfloat16":
            return 2 * (self.kv_lora_rank + self.qk_rope_head_dim)
        return self.kv_lora_rank + self.kv_lora_rank // QUANT_BLOCK * 4 + 2 * self.qk_rope_head_dim

    @property
    def index_bytes(self) -> int:
        """Bytes of one token's index key in one layer, its float32 scale included: 132 (NSA/DSATokenToKVPool)."""
        return self.index_head_dim + self.index_head_dim // QUANT_BLOCK * 4

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "config.json") -> ModelShape:
        """The shape that SGLang reads from a Hugging Face configuration.

        Raises:
            SizingError: it is no DSA model, or one whose cache HiSparse lays out in another way.
        """
        inner = config.get("text_config") or {}
        if not isinstance(inner, dict):
            raise SizingError(f"{name}: text_config is no object")
        text = {**config, **inner}
        named = config.get("architectures")
        architecture = str(named[0]) if isinstance(named, list) and named else ""
        other = architecture.startswith(NOT_COVERED)
        if other or text.get("compress_ratios") or text.get("sparse_attention_config"):
            raise SizingError(
                f"{architecture or name} is not covered: a model with compressed or block-sparse pages (DeepSeek-V4, "
                "MiniMax-M3); size covers DeepSeek Sparse Attention only: DeepSeek-V3.2, GLM-5.x"
            )
        if text.get("index_topk") is None:
            raise SizingError(
                f"{name} has no index_topk: it is no model with DeepSeek Sparse Attention, and --enable-hisparse "
                "refuses it. Give the config.json of DeepSeek-V3.2, GLM-5.x or another that has one"
            )
        try:
            if _integer(text, "index_kpool", default=1) > 1:
                raise ValueError(f"it pools its index keys (index_kpool {text['index_kpool']}); size does not know how")
            layers = _integer(text, "num_hidden_layers", MOST_LAYERS)
            return cls(
                layers=layers,
                kv_lora_rank=_integer(text, "kv_lora_rank"),
                qk_rope_head_dim=_integer(text, "qk_rope_head_dim"),
                index_head_dim=_integer(text, "index_head_dim"),
                index_topk=_integer(text, "index_topk"),
                shared_index=_shared_index(text, layers),
                draft_layers=_integer(text, "num_nextn_predict_layers", MOST_LAYERS, default=0),
                max_context=longest(text),
                name=architecture or name,
                heads=_integer(text, "num_attention_heads", default=0) or None,
            )
        except KeyError as missing:
            raise SizingError(f"{name} has no {missing.args[0]}: give the model's complete config.json") from None
        except ValueError as error:
            raise SizingError(f"{name}: {error}") from error

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """From a ``config.json`` or the folder that holds one.

        Raises:
            SizingError: there is none, it is no JSON object, or it is no DSA model.
        """
        file = path
        try:
            file = path / "config.json" if path.is_dir() else path
            config = json.loads(file.read_text("utf-8"))
        except OSError as error:
            raise SizingError(
                f"cannot read {file!s:.200}: {error.strerror}; give the config.json of the model, the folder that "
                "holds it, or the shape as numbers, starting with --layers"
            ) from error
        except (RecursionError, ValueError) as error:
            raise SizingError(f"{file} is no JSON: {error}") from error
        if not isinstance(config, dict):
            raise SizingError(f"{file} holds no JSON object: give a model's config.json")
        return cls.from_config(config, str(file))


@dataclass(frozen=True)
class Server:
    """One rank of a server: everything that its pools and tables are sized by."""

    release: str
    model: ModelShape
    hisparse: HiSparse
    kv_dtype: str
    device_tokens: int
    """Slots of the device pool, SGLang's max_total_num_tokens: a multiple of the page."""
    requests: int
    """Most requests this rank runs at once: --max-running-requests, divided among the ranks of DP attention."""
    context: int
    """Longest request in tokens, --context-length."""
    draft_tokens: int = 0
    """--speculative-num-draft-tokens, 0 for no speculation."""
    version: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise SizingError(f"KV dtype {self.kv_dtype!r}: HiSparse takes {' or '.join(KV_DTYPES)}")
        if self.device_tokens % self.hisparse.page_size:
            raise SizingError(f"{self.device_tokens} device tokens are no whole pages of {self.hisparse.page_size}")
        object.__setattr__(self, "version", version(self.release))

    @property
    def row(self) -> int:
        """Bytes of a KV row in one layer."""
        return self.model.row_bytes(self.kv_dtype)

    @property
    def logical_tokens(self) -> int:
        """Slots that requests count in; index keys are kept for each."""
        return self.device_tokens * self.hisparse.host_to_device_ratio


def _integer(config: Mapping[str, Any], key: str, most: int = MOST_WIDTH, default: int | None = None) -> int:
    """From 1 to `most`; where there is a `default`, an absent, null or 0 value stands for it."""
    value = config[key] if default is None else config.get(key) or default
    if type(value) is not int or not min(1, 1 if default is None else default) <= value <= most:
        raise ValueError(f"{key} is {json.dumps(value)[:40]}, which is no whole number from 1 to {most}")
    return value


def longest(config: Mapping[str, Any]) -> int | None:
    """Longest request, as get_context_length of SGLang 0.5.12 (utils/hf_transformers/common.py).

    Raises:
        ValueError: max_position_embeddings or rope_scaling is none.
    """
    positions = _integer(config, "max_position_embeddings", MOST_TOKENS, default=0)
    rope = config.get("rope_scaling") or {}
    factor = rope.get("factor", 1) if isinstance(rope, dict) else None
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= MOST_WIDTH:
        raise ValueError("rope_scaling is no object whose factor is a number above 0")
    if "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
        factor = 1
    return int(factor * positions) or None


def _shared_index(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """As dsa_layer_skips_topk of SGLang 0.5.23 (configs/model_config.py); empty where no layer shares."""
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    factor, frequency = (_integer(config, key, default=1) for key in ("cli_factor", "index_topk_freq"))
    offset = _integer(config, "index_skip_topk_offset", default=2) - 1
    if not isinstance(types, (list, type(None))) or not isinstance(pattern, (str, list, type(None))):
        raise ValueError("indexer_types and index_topk_pattern are a list and a string, by layer")
    if types is not None:
        shared = [i < len(types) and types[i] == "shared" for i in range(layers)]
    elif factor > 1:
        shared = [i % factor != 0 for i in range(layers)]
    elif pattern is not None:
        shared = [i < len(pattern) and pattern[i] == "S" for i in range(layers)]
    else:
        shared = [max(i - offset, 0) % frequency != 0 for i in range(layers)]
    return tuple(shared) if any(shared) else ()
