"""What speculative decoding with HiSparse cannot do, with the reason and the remedy of each.

`launch_check` asks before anything is loaded, with what arguments tell. The hooks ask again: an engine reads no command
line, and the size of the device pool is known when it is built.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    "wrong rows, and the plugin does not reach it. Install 0.5.10 to 0.5.15, where the plugin serves it, or 0.5.22 or "
    "later, which can by itself; or leave out --speculative-algorithm or --enable-hisparse"
)

OWN_DRAFT_TOKENS = (None, 2, 3, 4)  #: of SGLang's kernel

V32 = "DeepseekV32ForCausalLM"  #: DeepSeek-V3.2
V4 = "DeepSeek-V4's compressed KV cache is not covered"
SWAP_IN = "swap-in"  #: the overlay whose kernel is needed


PREFIX = "HiSparse with speculative decoding: "


@dataclass(frozen=True)
class Sizes:
    """What is asked of the pools; None: not known yet."""

    steps: int
    """Draft tokens of a request."""
    top_k: int
    """Tokens that a query selects."""
    hot_buffer: int
    page: int
    slots: int | None = None
    """Requests that may run at once."""
    rows: int | None = None
    """Of the device pool."""

    @classmethod
    def of_pools(cls, coordinator: Any, steps: int) -> Sizes:
        """As they have been built."""
        return cls(
            steps,
            coordinator.top_k,
            coordinator.device_buffer_size,
            coordinator.mem_pool_device.page_size,
            coordinator.req_to_token_pool.size,
            coordinator.token_to_kv_pool_allocator.hisparse_attn_allocator.size,
        )


def arguments(given: Any) -> Iterator[str]:
    """What is wrong with the arguments of a server, parsed or not."""
    for name, (allowed, remedy) in ARGUMENTS.items():
        value = getattr(given, name, None)
        if (value.upper() if name == "speculative_algorithm" and value else value) not in allowed:
            yield f"{name} is {value!r}: {remedy}"
    if SWAP_IN in config.skipped():
        yield f"overlay {SWAP_IN} is left out, and SGLang's own kernel knows no draft tokens: do not skip it"
    for name in FUSED_TOP_K:
        if os.environ.get(name, "1").lower() in {"0", "false", "no"}:
            yield f"{name} is off: unset it"
    if getattr(given, "device", None) == "cuda":
        yield from _compiler()


def model(server_args: Any, architectures: Iterable[str]) -> Iterator[str]:
    """Why this SGLang could not draft for a model of these architectures, or not with HiSparse."""
    if any(name.startswith("DeepseekV4") for name in architectures):
        yield V4
    if getattr(server_args, "speculative_draft_model_path", None) not in {None, server_args.model_path}:
        return
    if V32 in architectures and not upstream.finds_next_token_layer(V32):
        yield (
            f"this SGLang does not find the next-token layer of {V32}: install 0.5.12 or later, or add "
            """--json-model-override-args '{"architectures": ["DeepseekV3ForCausalLM"]}'"""
        )


def sizes(s: Sizes) -> Iterator[str]:
    """Where draft tokens do not fit the buffers, or the buffers the device pool."""
    most = s.hot_buffer // s.top_k
    if s.steps > most:
        yield (
            f"{s.steps} draft tokens select up to {s.steps} x {s.top_k} rows, the hot buffer has {s.hot_buffer}: "
            f"set device_buffer_size to {s.steps * s.top_k} or more in --hisparse-config"
            + (f", or --speculative-num-draft-tokens to {most}" if most > 1 else "")
        )
    if s.steps > s.page - 1:
        yield f"{s.steps} draft tokens do not fit an extra page of {s.page} rows: at most {s.page - 1}"
    buffer = s.hot_buffer + s.page
    if s.slots is not None and s.rows is not None and s.slots * buffer > s.rows:
        fit = s.rows // buffer
        remedy = f"set --max-running-requests to {fit}" if fit else "give the KV cache more memory"
        yield (
            f"each request has a whole buffer of {buffer} rows from its first step on; {s.slots} of them "
            f"need {s.slots * buffer} rows and the device pool has {s.rows}: {remedy}, or a smaller "
            "device_buffer_size in --hisparse-config"
        )


def of_sglang(given: Any) -> Iterator[str]:
    """What SGLang's own way, from 0.5.22 on, cannot do and finds out late."""
    if getattr(given, "disable_overlap_schedule", False):
        yield (
            "without the overlap scheduler this SGLang keeps no draft of a request that leaves staging, and its first "
            "decode step ends the server: leave --disable-overlap-schedule out"
        )
    tokens = getattr(given, "speculative_num_draft_tokens", None)
    if tokens not in OWN_DRAFT_TOKENS:
        yield f"{tokens} draft tokens are not among the 2 to 4 that this SGLang's kernel takes"


def check_arguments(server_args: Any) -> None:
    """Raise :class:`Unsupported` for a server that could not verify drafts with HiSparse."""
    _raise(arguments(server_args))


def check_model(runner: Any) -> None:
    """Raise :class:`Unsupported` for a model whose next-token layer this SGLang would not find."""
    _raise(model(runner.server_args, runner.model_config.hf_config.architectures))


def check_pools(coordinator: Any, steps: int) -> None:
    """Raise :class:`Unsupported` where draft tokens do not fit the buffers, or the buffers the device pool."""
    if getattr(coordinator, "is_dsv4_hisparse", False):
        _raise([V4])
    compiler = _compiler() if coordinator.req_to_device_buffer.device.type == "cuda" else ()
    _raise([*compiler, *sizes(Sizes.of_pools(coordinator, steps))])


def prefixed(problems: Iterable[str]) -> list[str]:
    """All of them in one text, or none."""
    found = list(problems)
    return [PREFIX + "; ".join(found)] if found else []


@contextlib.contextmanager
def ends_the_process() -> Iterator[None]:
    """What is unsupported is said in one line, and the process ends with exit code 1; no traceback, no signal."""
    try:
        yield
    except Unsupported as error:
        print(f"HiSparse plugin: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _compiler() -> Iterator[str]:
    from ..kernels import build

    if build.find_nvcc() is None:
        yield "the swap-in kernel needs a CUDA compiler, and there is none: put nvcc on PATH or set CUDA_HOME"


def _raise(problems: Iterable[str]) -> None:
    for text in prefixed(problems):
        raise Unsupported(text)
