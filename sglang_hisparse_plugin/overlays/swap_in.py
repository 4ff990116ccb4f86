"""The coordinator's swap-in runs on our kernel."""

from __future__ import annotations

import ast
import functools
import logging
from collections.abc import Callable
from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .probing import existing, expect, expect_hookable, expect_plain, probe

logger = logging.getLogger(__name__)

SWAP_IN, COPY_PLANNED = "load_cache_to_device_buffer_mla", "copy_cache_planned_mla"
#: SGLang's own verification of draft tokens, from 0.5.22, and its arguments.
VERIFY = "HiSparseSpecSwapManager.swap_in"
QUERIES = ("req_pool_indices", "compressed_seq_lens", "top_k_result", "layer_id")
#: Layouts that stay on SGLang's kernel.
NOT_COVERED = {
    "load_cache_to_device_buffer_dsv4_mla": "DeepSeek-V4's paged rows",
    "load_blocks_to_device_buffer_mha": "MiniMax-M3's blocks",
}
#: What the op understands, by the names the coordinator uses; `page_size` and the launch shape mean nothing to it.
ARGUMENTS = {
    SWAP_IN: {
        *("top_k_tokens", "device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "host_cache"),
        *("device_buffer", "top_k_device_locs", "req_pool_indices", "seq_lens", "lru_slots", "item_size_bytes"),
        *("num_top_k", "hot_buffer_size", "page_size", "block_size", "num_real_reqs", "skip_io"),
    },
    COPY_PLANNED: {
        *("miss_src", "miss_dst", "miss_count", "num_real_reqs", "host_cache", "device_buffer", "item_size_bytes"),
        *("num_blocks", "block_size", "is_dsv4_layout", "skip_io"),
    },
}


@probe
def judge(tree: SourceTree) -> Verdict:
    imported = _imported(tree)
    if SWAP_IN not in imported:
        expect(not tree.mentions(upstream.COORDINATOR, SWAP_IN), f"from ... import {SWAP_IN}", "another use of it")
        return Absent(f"the coordinator does not use {SWAP_IN}")
    calls = _calls(tree, SWAP_IN)
    expect(len(calls) == 1, f"one method of the coordinator that runs {SWAP_IN}", f"{len(calls)} calls")
    if COPY_PLANNED in imported:
        calls += _calls(tree, COPY_PLANNED)
    for name, call in zip((SWAP_IN, COPY_PLANNED), calls, strict=False):
        # `**plan` and `**kwargs` hold the miss plan and skip_io.
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        expect(not call.args and given <= ARGUMENTS[name], f"{name} with arguments known here", _listed(call))
    for hook in hooks(tree):
        expect_plain(existing(tree.function(*hook.target.split(":")), hook.target))
    if verifies := tree.function(upstream.COORDINATOR, VERIFY):
        expect_hookable(verifies, "self", *QUERIES, more=True)
    return Defective(f"swap-in runs on SGLang's {SWAP_IN}")


def _imported(tree: SourceTree) -> dict[str, str]:
    """Module of SGLang from which the coordinator imports each of its functions."""
    module = tree.module(upstream.COORDINATOR)
    froms = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.module] if module else []
    found = {alias.name: str(node.module) for node in froms for alias in node.names if alias.asname is None}
    return {name: home for name, home in found.items() if tree.function(home, name)}


def _calls(tree: SourceTree, name: str) -> list[ast.Call]:
    """Calls of `name` in the methods known to make them; one may choose between two layouts first."""
    methods = ("_run_swap_in_kernel", "swap_in_selected_pages", "_run_copy_only_kernel")
    found = [upstream.coordinator_method(tree, method) for method in methods]
    callee = "swap_in_fn" if name == SWAP_IN else name
    return [call for method in found if method for wanted in {name, callee} for call in method.calls(wanted)]


def _listed(call: ast.Call) -> str:
    return f"{len(call.args)} positional, " + ", ".join(keyword.arg or "**" for keyword in call.keywords)


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    """Hooks for the functions that this coordinator imports by name, where they are defined."""
    routes = {SWAP_IN: swap_in, COPY_PLANNED: copy_planned, **{name: _report(name) for name in NOT_COVERED}}
    found = [Hook(f"{home}:{name}", routes[name]) for name, home in _imported(tree).items() if name in routes]
    if tree.function(upstream.COORDINATOR, VERIFY):
        found.append(Hook(f"{upstream.COORDINATOR}:{VERIFY}", verify))
    return tuple(found)


def swap_in(original: Any, *, page_size: int = 1, block_size: int = 256, **call: Any) -> None:
    """SGLang's arguments, without those of a launch."""
    _route(original, _observed, call, call["device_buffer"], page_size=page_size, block_size=block_size)


def _observed(**call: Any) -> None:
    """The op, with counters and a trace where somebody asked for them."""
    from ..kernels import swap_in as kernels
    from ..observe import start

    kernels.swap_in(**call, counters=start.counters_for(call))


def copy_planned(original: Any, *, num_blocks: int = 4, block_size: int = 1024, **call: Any) -> None:
    """The copy of a recorded plan, on as many blocks as the link wants and not on four."""
    from ..kernels import swap_in as kernels

    special = {name: call.pop(name) for name in ("is_dsv4_layout", "skip_io") if name in call}
    if any(special.values()):
        original(num_blocks=num_blocks, block_size=block_size, **call, **special)
        return
    _route(original, kernels.copy_planned, call, call["device_buffer"], num_blocks=num_blocks, block_size=block_size)


def verify(original: Any, manager: Any, *args: Any, **plan: Any) -> Any:
    """The queries of SGLang's own verification, where our op is the faster and no other layer waits for a plan."""
    from ..speculative import own

    asked = dict(zip(QUERIES, args, strict=False)) | {name: plan.pop(name) for name in QUERIES if name in plan}
    selected = asked["top_k_result"]
    if plan or not own.serves(manager._coordinator, selected):
        return original(manager, **asked, **plan)
    theirs, ours = functools.partial(original, manager), functools.partial(own.swap_in, manager)
    return _route(theirs, ours, asked, selected, stays=lambda: own.has_answered(manager))


def _route(
    original: Any,
    ours: Callable[..., Any],
    call: dict[str, Any],
    where: Any,
    *,
    stays: Callable[[], bool] = lambda: False,
    **launch: int,
) -> Any:
    """Ours, where it runs; SGLang's kernel elsewhere, and from then on if ours cannot be built or run.

    Args:
        stays: whether SGLang's kernel could no longer go on from what ours has left.
    """
    if stays() or (not _failed and not _elsewhere(where.device.type)):
        from ..kernels import build

        failure: Exception
        try:
            return ours(**call)
        except build.TooLittleSharedMemory as error:
            failure, cannot = error, "run"
        except (ValueError, TypeError):
            raise  # a broken contract would break SGLang's kernel without a word
        except Exception as error:  # the compiler, or what the loader makes of it
            failure, cannot = error, "be built"
        if stays():
            raise RuntimeError(STRANDED) from failure
        _report_failed(f"ours cannot {cannot}", failure)
    return original(**launch, **call)


STRANDED = (
    "HiSparse overlay swap-in: our op failed after it had answered verifications, of which SGLang's kernel knows "
    "nothing: the server ends rather than read wrong rows; start it with --hisparse-plugin-skip swap-in"
)
_failed: list[Exception] = []


def _report_failed(what: str, error: Exception) -> None:
    _failed.append(error)
    logger.warning("HiSparse overlay swap-in: SGLang's own kernel serves, %s: %s", what, error)


@functools.cache
def _elsewhere(device_type: str) -> bool:
    import torch

    from ..kernels import build

    if torch.version.hip or device_type not in ("cuda", "cpu"):
        why = f"skipped on {'ROCm' if torch.version.hip else device_type}"
    elif device_type == "cuda" and build.find_nvcc() is None:
        why = "skipped, no CUDA compiler was found: put nvcc on PATH or set CUDA_HOME"
    else:
        return False
    logger.warning("HiSparse overlay swap-in: %s; SGLang's own kernel serves", why)
    return True


def _report(name: str) -> Callable[..., Any]:
    @functools.cache
    def say() -> None:
        rows = NOT_COVERED[name]
        logger.warning("HiSparse overlay swap-in: skipped, %s are not covered; SGLang's own kernel serves", rows)

    def pass_through(original: Any, *args: Any, **kwargs: Any) -> Any:
        say()
        return original(*args, **kwargs)

    return pass_through


OVERLAY = Overlay(
    id="swap-in",
    symptom="swap-in loses the end of rows, fails on unaligned ones, and takes several times what the link needs",
    why=(
        "SGLang's kernel copies whole 8-byte words, loads 16 bytes at addresses that need not allow it, takes -1 and "
        "repeated entries for misses, and gives a request one block and a row one warp. The hook sends the "
        "coordinator's call to our kernel, which writes the same tables in the same order (docs/swap_in.md)."
    ),
    loses="swap-in stays slow at small batch, and rows that are no multiple of 16 bytes arrive damaged",
    no_diff="the kernel lives in this package (csrc/), not in SGLang's files",
    rows=("byte-tail", "misaligned", "invalid-entries", "lru-order", "small-block", "planned-grid"),
    origin="call for contribution in sgl-project/sglang#28874; row tails were noted in the review of #22131",
    remove_when="SGLang's kernel passes tests/kernels and bench shows no gain",
    probe=judge,
    hooks=hooks,
)
