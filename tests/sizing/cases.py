"""The servers that are measured and sized: known to both sides, so no SGLang and no torch here."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hisparse_plugin.sizing.shapes import HiSparse, ModelShape

TORCH_DTYPES = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}
POOL_CLASSES = ("HiSparseNSATokenToKVPool", "HiSparseDSATokenToKVPool")


@dataclass(frozen=True)
class Case:
    model: ModelShape
    hisparse: HiSparse
    kv_dtype: str
    device_tokens: int
    requests: int
    columns: int
    """Of req_to_token: context and headroom."""
    draft_tokens: int = 0


SHARING = ModelShape(layers=5, index_topk=1024, shared_index=(False, True, True, False, True))
BUILT = {
    "built": Case(SHARING, HiSparse(1024, 1536, 3), "fp8_e4m3", 4160, 7, 5000),
    "wider": Case(ModelShape(layers=2, index_topk=512), HiSparse(512, 2048, 5), "bfloat16", 2112, 3, 9001),
    "speculating": Case(SHARING, HiSparse(1024, 1088, 2), "fp8_e4m3", 3200, 6, 3000, draft_tokens=3),
}
#: DeepSeek-V3.2's, as far as sizes go.
CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
