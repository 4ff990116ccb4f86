"""What speculative decoding with HiSparse cannot do, with the reason and the remedy of each.

`launch_check` asks before anything is loaded, with what arguments tell. The hooks ask again: an engine reads no command
line, and the size of the device pool is known when it is built.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import config, upstream
from .problem import Problem, Unsupported
from .room import Sizes, sizes

Rows = dict[str, tuple[tuple[object, ...], str]]

_OF_BOTH: Rows = {
    "speculative_algorithm": (
        ("EAGLE", "NEXTN"),
        "use --speculative-algorithm EAGLE, the model's own next-token layer",
    ),
    "speculative_eagle_topk": ((None, 1), "use --speculative-eagle-topk 1: drafts are verified as chains, not trees"),
    "speculative_adaptive": ((None, False), "leave --speculative-adaptive out: the length of drafts is fixed"),
    "enable_multi_layer_eagle": ((None, False), "leave --enable-multi-layer-eagle out"),
    "pp_size": ((None, 1), "serve without pipeline parallelism"),
    "enable_two_batch_overlap": ((None, False), "leave --enable-two-batch-overlap out"),
}
#: argument of the server -> (the values it may have, what else to do)
ARGUMENTS: Rows = _OF_BOTH | {
    "disaggregation_mode": ((None, "null"), "serve without PD disaggregation, or install 0.5.22 or later"),
}
#: The same for SGLang's own way, from 0.5.22 on.
ARGUMENTS_OF_SGLANG: Rows = _OF_BOTH | {
    "disable_overlap_schedule": (
        (None, False),
        "without the overlap scheduler (pipeline stages have none) this SGLang keeps no draft of a request that leaves "
        "staging, and its first decode step ends the server: leave --disable-overlap-schedule out",
    ),
}
#: How the command line of releases to 0.5.13 names an argument before SGLang has read it.
SPELLED = {"pp_size": "pipeline_parallel_size"}
#: What SGLang turns off by itself where one of these is given, so that only what it makes of it counts.
TURNED_OFF = {"speculative_adaptive": ("enable_dp_attention", "attn_dp_size", "enable_pdmux")}
#: SGLang's switches of the indexer's fused top-k, by release. Off, positions are translated where rows are at hand.
FUSED_TOP_K = ("SGLANG_NSA_FUSE_TOPK", "SGLANG_DSA_FUSE_TOPK")

#: Where nothing serves both.
NOT_HERE = Problem(
    "HiSparse with speculative decoding: this SGLang cannot serve it, for draft tokens would be verified against the "
    "wrong rows, and the plugin does not reach it",
    "install 0.5.10 to 0.5.15, where the plugin serves it, or 0.5.22 or later, which can by itself; or leave out "
    "--speculative-algorithm or --enable-hisparse",
)


V32 = "DeepseekV32ForCausalLM"  #: DeepSeek-V3.2
V4 = Problem("DeepSeek-V4's compressed KV cache is not covered", "leave --speculative-algorithm out")
SWAP_IN = "swap-in"  #: the overlay whose kernel is needed


PREFIX = "HiSparse with speculative decoding: "


def asked(given: Any) -> bool:
    """Whether there is to be speculation: with aux hidden states to return, the algorithm only names their layers."""
    name = str(getattr(given, "speculative_algorithm", None)).upper()
    return name not in {"", "NONE"} and not getattr(given, "enable_return_aux_hidden_states", False)


def arguments(given: Any, environment: Mapping[str, str] = os.environ, *, resolved: bool = False) -> Iterator[Problem]:
    """What is wrong with the arguments of a server.

    Args:
        resolved: they are as SGLang has made them; otherwise as they were given.
    """
    yield from _wrong(ARGUMENTS, given, resolved)
    if SWAP_IN in config.skipped():
        yield Problem(f"overlay {SWAP_IN} is left out, and SGLang's own kernel knows no draft tokens", "do not skip it")
    for name in FUSED_TOP_K:
        if environment.get(name, "1").lower() in {"0", "false", "no"}:
            yield Problem(f"{name} is off", "unset it")
    if getattr(given, "device", None) == "cuda":
        yield from _compiler()


def of_sglang(given: Any, *, resolved: bool = False) -> Iterator[Problem]:
    """The same for SGLang's own way, from 0.5.22 on, which finds it out late or with a traceback."""
    stages = getattr(given, "disaggregation_mode", None) != "decode"  # there drafts come with the KV, past staging
    yield from _wrong(ARGUMENTS_OF_SGLANG if stages else _OF_BOTH, given, resolved)


def _wrong(rows: Rows, given: Any, resolved: bool) -> Iterator[Problem]:
    for name, (allowed, remedy) in rows.items():
        value = getattr(given, name, None) or getattr(given, SPELLED.get(name, name), None)
        turned_off = not resolved and any(_on(getattr(given, other, None)) for other in TURNED_OFF.get(name, ()))
        if (value.upper() if name == "speculative_algorithm" and value else value) not in allowed and not turned_off:
            yield Problem(f"{name} is {value!r}", remedy)
    n = getattr(given, "speculative_num_draft_tokens", None)
    k, steps = getattr(given, "speculative_eagle_topk", None), getattr(given, "speculative_num_steps", None)
    if not resolved and steps is None and (n, k) != (None, None):
        yield Problem(
            f"no speculative_num_steps, but speculative_num_draft_tokens is {n} and speculative_eagle_topk is {k}",
            f"add --speculative-num-steps {max(1, (n or 0) - 1)}, or leave all three to SGLang",
        )


def _on(value: bool | int | None) -> bool:
    """A switch, or a number of ranks above one."""
    return value is True or (value or 0) > 1


def model(given: Any, architectures: Iterable[str], *, finds_v32: bool) -> Iterator[Problem]:
    """Why there could be no drafts for a model of these architectures, or not with HiSparse.

    Args:
        finds_v32: whether SGLang takes DeepSeek-V3.2's own layer for its drafts.
    """
    names = list(architectures)
    if any(name.startswith("DeepseekV4") for name in names):
        yield V4
    own = getattr(given, "speculative_draft_model_path", None) in {None, given.model_path}
    if own and V32 in names and not finds_v32:
        yield Problem(
            f"this SGLang does not find the next-token layer of {V32}",
            "install 0.5.12 or later, or add "
            """--json-model-override-args '{"architectures": ["DeepseekV3ForCausalLM"]}'""",
        )


def check_arguments(server_args: Any) -> None:
    """Raise :class:`Unsupported` for a server that could not verify drafts with HiSparse."""
    _raise(arguments(server_args, resolved=True))


def check_model(runner: Any) -> None:
    """Raise :class:`Unsupported` for a model whose next-token layer this SGLang would not find."""
    names = runner.model_config.hf_config.architectures
    _raise(model(runner.server_args, names, finds_v32=upstream.finds_next_token_layer(V32)))


def check_pools(coordinator: Any, steps: int) -> None:
    """Raise :class:`Unsupported` where draft tokens do not fit the buffers, or the buffers the device pool."""
    if getattr(coordinator, "is_dsv4_hisparse", False):
        _raise([V4])
    compiler = _compiler() if coordinator.req_to_device_buffer.device.type == "cuda" else ()
    _raise([*compiler, *sizes(Sizes.of_pools(coordinator, steps))])


def prefixed(problems: Iterable[Problem | str]) -> list[str]:
    """All of them in one text, or none."""
    found = [str(problem) for problem in problems]
    return [PREFIX + "; ".join(found)] if found else []


@contextlib.contextmanager
def ends_the_process() -> Iterator[None]:
    """What is unsupported is said in one line, and the process ends with exit code 1; no traceback, no signal."""
    try:
        yield
    except Unsupported as error:
        print(f"HiSparse plugin: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _compiler() -> Iterator[Problem]:
    from ..kernels import build

    if build.find_nvcc() is None:
        yield Problem(
            "the swap-in kernel needs a CUDA compiler, and there is none", "put nvcc on PATH or set CUDA_HOME"
        )


def _raise(problems: Iterable[Problem]) -> None:
    for text in prefixed(problems):
        raise Unsupported(text)
