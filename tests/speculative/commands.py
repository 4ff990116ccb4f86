"""Command lines of servers that speculate, and what becomes of each: by the plugin's way, and by SGLang's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 2048,
    "intermediate_size": 256,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "first_k_dense_replace": 1,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, object]] = {
    "dsa": {},
    "v32": {"architectures": ["DeepseekV32ForCausalLM"]},
    "narrow": {"index_topk": 512},
    "v4": {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [4], "sliding_window": 128},
}
SERVER = (
    *("--load-format", "dummy", "--device", "cpu", "--skip-tokenizer-init", "--disable-radix-cache"),
    *("--enable-hisparse", "--attention-backend", "nsa", "--kv-cache-dtype", "bfloat16", "--mem-fraction-static"),
    *("0.1", "--page-size", "64", "--port", "31998"),
)
EAGLE: dict[str, str | None] = {
    "--speculative-algorithm": "EAGLE",
    "--speculative-eagle-topk": "1",
    "--speculative-num-steps": "1",
    "--speculative-num-draft-tokens": "2",
}
SERVES = ""


@dataclass(frozen=True)
class Command:
    """A command line, and what the one line says that ends it; empty: it serves."""

    by_plugin: str
    """0.5.10 to 0.5.15."""
    by_sglang: str
    """From 0.5.22 on."""
    flags: Mapping[str, str | None] = field(default_factory=dict)
    """On top of `EAGLE`; "" takes no value, None: left out."""
    model: str = "dsa"
    environment: Mapping[str, str] = field(default_factory=dict)
    asks: bool = True
    """Whether it asks for speculation at all."""
    since: tuple[int, ...] = (0, 5, 10)
    """The first release whose parser knows its flags."""
    before: tuple[int, ...] = (1,)
    """The first release where it is otherwise."""

    def words(self, folder: str) -> Iterator[str]:
        yield from ("--model-path", f"{folder}/{self.model}", *SERVER)
        for flag, value in (EAGLE | dict(self.flags)).items():
            if value is not None:
                yield from (flag, value) if value else (flag,)


def both(says: str, **flags: str | None) -> Command:
    return each(says, says, **flags)


def each(by_plugin: str, by_sglang: str, **flags: str | None) -> Command:
    return Command(by_plugin, by_sglang, {f"--{name.replace('_', '-')}": value for name, value in flags.items()})


ALGORITHM = "use --speculative-algorithm EAGLE, the model's own next-token layer"
V4 = "DeepSeek-V4's compressed KV cache is not covered: leave --speculative-algorithm out"
STAGES = "pp_size is 2: serve without pipeline parallelism"


def steps(n: int) -> dict[str, str | None]:
    return {"speculative_num_steps": str(n), "speculative_num_draft_tokens": None}


DP = {"--enable-dp-attention": "", "--dp-size": "2", "--tp-size": "2"}
CAPTURE = {
    "--speculative-algorithm": "EAGLE3",
    "--enable-return-aux-hidden-states": "",
    **dict.fromkeys(("--speculative-eagle-topk", "--speculative-num-steps", "--speculative-num-draft-tokens")),
}
NEXT_LAYER = """add --json-model-override-args '{"architectures": ["DeepseekV3ForCausalLM"]}'"""

GOOD = {
    "eagle": both(SERVES),
    "nextn": both(SERVES, speculative_algorithm="NEXTN"),
    "steps-alone-count": both(SERVES, speculative_num_draft_tokens="9"),
    "mixed-chunks-are-turned-off": both(SERVES, enable_mixed_chunk="", chunked_prefill_size="256"),
    "many-requests": both(SERVES, max_running_requests="4"),
    "ranks-of-dp-attention-share-slots": Command(SERVES, SERVES, DP | {"--max-running-requests": "4200"}),
    "drafts-and-buffer": both(SERVES, hisparse_config='{"device_buffer_size": 6144}', **steps(2)),
    "adaptive-is-turned-off": Command(SERVES, SERVES, DP | {"--speculative-adaptive": ""}, since=(0, 5, 11)),
    "adaptive-is-turned-off-too": Command(
        SERVES, SERVES, {"--speculative-adaptive": "", "--attn-dp-size": "2", "--tp-size": "2"}, since=(0, 5, 23)
    ),
    "small": Command(SERVES, SERVES, {"--speculative-algorithm": "eagle"}, since=(0, 5, 12)),
    "all-by-sglang": Command(
        "4 draft tokens select up to 4 x 2048 rows",
        SERVES,
        dict.fromkeys(("--speculative-eagle-topk", "--speculative-num-steps", "--speculative-num-draft-tokens")),
    ),
    "no-speculation": Command(SERVES, SERVES, dict.fromkeys(EAGLE), asks=False),
    "the-word-none": Command(
        SERVES, SERVES, dict.fromkeys(EAGLE) | {"--speculative-algorithm": "none"}, asks=False, since=(0, 5, 12)
    ),
    "capture": Command(SERVES, SERVES, CAPTURE, asks=False, since=(0, 5, 23)),
    "v32": Command(SERVES, SERVES, model="v32", since=(0, 5, 12)),
}
REFUSED = {
    "adaptive": Command(
        "speculative_adaptive is True: leave --speculative-adaptive out",
        "speculative_adaptive is True: leave --speculative-adaptive out",
        {"--speculative-adaptive": ""},
        since=(0, 5, 11),
    ),
    "dflash": Command(
        f"speculative_algorithm is 'DFLASH': {ALGORITHM}",
        f"speculative_algorithm is 'DFLASH': {ALGORITHM}",
        {"--speculative-algorithm": "DFLASH"},
        since=(0, 5, 11),
    ),
    "ngram": both(f"speculative_algorithm is 'NGRAM': {ALGORITHM}", speculative_algorithm="NGRAM"),
    "standalone": both(f"speculative_algorithm is 'STANDALONE': {ALGORITHM}", speculative_algorithm="STANDALONE"),
    "eagle3": both(f"speculative_algorithm is 'EAGLE3': {ALGORITHM}", speculative_algorithm="EAGLE3"),
    "tree": both("speculative_eagle_topk is 4: use --speculative-eagle-topk 1", speculative_eagle_topk="4"),
    "pp": both(STAGES, pp_size="2"),
    "pp-in-full": both(STAGES, pipeline_parallel_size="2"),
    "two-batches": both(
        "enable_two_batch_overlap is True: leave --enable-two-batch-overlap out", enable_two_batch_overlap=""
    ),
    "multi-layer": both(
        "enable_multi_layer_eagle is True: leave --enable-multi-layer-eagle out", enable_multi_layer_eagle=""
    ),
    "one-token": both("draft tokens of a request are 1", speculative_num_draft_tokens="1", speculative_num_steps="0"),
    "no-steps": both("add --speculative-num-steps 1, or leave all three to SGLang", speculative_num_steps=None),
    "pd": each(
        "disaggregation_mode is 'decode': serve without PD disaggregation, or install 0.5.22",
        SERVES,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="mooncake",
    ),
    "three": each("3 draft tokens select up to 3 x 2048 rows, the hot buffer has 4096", SERVES, **steps(2)),
    "five": each(
        "or --speculative-num-steps to 1",
        "5 draft tokens are not among the 2 to 4 that this SGLang's kernel takes: set --speculative-num-steps to 3",
        **steps(4),
    ),
    "no-overlap": each(SERVES, "leave --disable-overlap-schedule out", disable_overlap_schedule=""),
    "pools": each(
        "9 of them need 37440 rows and the device pool has 36864: set --max-running-requests to 8",
        SERVES,
        max_running_requests="9",
        max_total_tokens="36864",
    ),
    "slots": each(
        "4096 of them need",
        "4096 requests of a rank and one slot more exceed the device_buffer_size of 4096",
        max_running_requests="4096",
        max_total_tokens="1048576",
    ),
    "ratio": both("host_to_device_ratio is 2.5", hisparse_config='{"host_to_device_ratio": 2.5}'),
    "narrow": Command(
        SERVES,
        "the top_k is 512, and this SGLang's kernel takes 1024 or more",
        {"--hisparse-config": '{"top_k": 512}'},
        model="narrow",
    ),
    "v32-early": Command(NEXT_LAYER, NEXT_LAYER, model="v32", before=(0, 5, 12)),
    "v4": Command(V4, V4, model="v4", since=(0, 5, 15)),
    "fused": Command("SGLANG_NSA_FUSE_TOPK is off: unset it", SERVES, environment={"SGLANG_NSA_FUSE_TOPK": "0"}),
}
ALL = GOOD | REFUSED


def of(release: str) -> list[tuple[str, Command]]:
    """Those that a release's parser knows."""
    version = tuple(map(int, release.split(".")[:3]))
    return [(name, command) for name, command in ALL.items() if command.since <= version < command.before]
