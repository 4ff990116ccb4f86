"""What speculative decoding with HiSparse cannot do, said before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from .. import config, upstream


class Unsupported(ValueError):
    """A configuration that cannot be right; the text says why and what to change."""


#: argument of the server -> (the values it may have, what else to do)
ARGUMENTS = {
    "speculative_algorithm": (
        ("EAGLE", "NEXTN"),
        "use --speculative-algorithm EAGLE, the model's own next-token layer",
    ),
    "speculative_eagle_topk": ((None, 1), "use --speculative-eagle-topk 1: drafts are verified as chains, not trees"),
    "speculative_adaptive": ((None, False), "leave --speculative-adaptive out: the length of drafts is fixed"),
    "enable_multi_layer_eagle": ((None, False), "leave --enable-multi-layer-eagle out"),
    "disaggregation_mode": ((None, "null"), "serve without PD disaggregation"),
    "pp_size": ((None, 1), "serve without pipeline parallelism"),
    "enable_two_batch_overlap": ((None, False), "leave --enable-two-batch-overlap out"),
    "enable_mixed_chunk": ((None, False), "leave --enable-mixed-chunk out"),
}
#: SGLang's switches of the indexer's fused top-k, by release. Off, positions are translated where rows are at hand.
FUSED_TOP_K = ("SGLANG_NSA_FUSE_TOPK", "SGLANG_DSA_FUSE_TOPK")

#: Where nothing serves both.
NOT_HERE = (
    "HiSparse with speculative decoding: this SGLang cannot serve it, for draft tokens would be verified against the "
    "wrong rows, and the plugin does not reach it. Install 0.5.12 to 0.5.15, where the plugin serves it, or 0.5.22 or "
    "later, which can by itself; or leave out --speculative-algorithm or --enable-hisparse"
)

V32 = "DeepseekV32ForCausalLM"  #: DeepSeek-V3.2
SWAP_IN = "swap-in"  #: the overlay whose kernel is needed


def check_arguments(server_args: Any) -> None:
    """Raise :class:`Unsupported` for a server that could not verify drafts with HiSparse."""
    _raise(_arguments(server_args))


def _arguments(server_args: Any) -> Iterator[str]:
    for name, (allowed, remedy) in ARGUMENTS.items():
        value = getattr(server_args, name, None)
        if value not in allowed:
            yield f"{name} is {value!r}: {remedy}"
    if SWAP_IN in config.skipped():
        yield f"overlay {SWAP_IN} is left out, and SGLang's own kernel knows no draft tokens: do not skip it"
    for name in FUSED_TOP_K:
        if os.environ.get(name, "1").lower() in {"0", "false", "no"}:
            yield f"{name} is off: unset it"


def check_model(runner: Any) -> None:
    """Raise :class:`Unsupported` for a model whose next-token layer this SGLang would not find."""
    _raise(_model(runner))


def _model(runner: Any) -> Iterator[str]:
    drafts = runner.server_args.speculative_draft_model_path
    if drafts not in {None, runner.server_args.model_path}:
        return
    if V32 in runner.model_config.hf_config.architectures and not upstream.finds_next_token_layer(V32):
        yield (
            f"this SGLang does not find the next-token layer of {V32}: install 0.5.12 or later, or add "
            """--json-model-override-args '{"architectures": ["DeepseekV3ForCausalLM"]}'"""
        )


def check_pools(coordinator: Any, steps: int) -> None:
    """Raise :class:`Unsupported` where draft tokens do not fit the buffers, or the buffers the device pool."""
    _raise(_pools(coordinator, steps))


def _pools(c: Any, steps: int) -> Iterator[str]:
    if getattr(c, "is_dsv4_hisparse", False):
        yield "DeepSeek-V4's compressed KV cache is not covered"
        return
    if c.req_to_device_buffer.device.type == "cuda":
        from ..kernels import build

        if build.find_nvcc() is None:
            yield "the swap-in kernel needs a CUDA compiler, and there is none: put nvcc on PATH or set CUDA_HOME"
    most = c.device_buffer_size // c.top_k
    if steps > most:
        yield (
            f"{steps} draft tokens select up to {steps} x {c.top_k} rows, the hot buffer has {c.device_buffer_size}: "
            f"set device_buffer_size to {steps * c.top_k} or more in --hisparse-config"
            + (f", or --speculative-num-draft-tokens to {most}" if most > 1 else "")
        )
    page = c.mem_pool_device.page_size
    if steps > page - 1:
        yield f"{steps} draft tokens do not fit an extra page of {page} rows: at most {page - 1}"
    slots = c.req_to_token_pool.size
    rows = c.token_to_kv_pool_allocator.hisparse_attn_allocator.size
    if slots * c.padded_buffer_size > rows:
        fit = rows // c.padded_buffer_size
        remedy = f"set --max-running-requests to {fit}" if fit else "give the KV cache more memory"
        yield (
            f"each request has a whole buffer of {c.padded_buffer_size} rows from its first step on; {slots} of them "
            f"need {slots * c.padded_buffer_size} rows and the device pool has {rows}: {remedy}, or a smaller "
            "device_buffer_size in --hisparse-config"
        )


def _raise(problems: Iterator[str]) -> None:
    found = list(problems)
    if found:
        raise Unsupported("HiSparse with speculative decoding: " + "; ".join(found))
