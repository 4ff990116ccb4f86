"""Arguments that HiSparse does not go with, and that SGLang takes. Standard library only.

`launch_check` ends the server by it, and the doctor says it before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from . import upstream
from .patching.source import SourceTree
from .speculative.problem import Problem

SENDS_PAGES = ("nixl", "mori")  #: --disaggregation-transfer-backend


def takes_tokens(tree: SourceTree) -> bool:
    """Whether a decode server's host pool is addressed by token, as to 0.5.12; Mooncake's transfer alone knows that."""
    return tree.function(upstream.MOONCAKE, "MooncakeKVManager.send_kvcache_hisparse") is not None


def problems(given: Any, by_token: Callable[[], bool]) -> Iterator[Problem]:
    """What is wrong with the arguments of a server.

    Args:
        given: as SGLang's parser or SGLang itself has made them.
        by_token: see `takes_tokens`; asked only where it matters.
    """
    yield from _disaggregation(given, by_token)
    if getattr(given, "enable_streaming_session", None):
        yield Problem(
            "--enable-streaming-session keeps a request's KV for the session's next turn, and HiSparse gives up at the "
            "request's end where it is, so that the next turn would read other rows",
            "leave it out; sessions that do not stream are computed anew, and right",
        )


def _disaggregation(given: Any, by_token: Callable[[], bool]) -> Iterator[Problem]:
    mode = getattr(given, "disaggregation_mode", None)
    if mode == "prefill":
        yield Problem(
            "a prefill server does not decode, and would send KV from wrong rows of HiSparse's device pool",
            "leave --enable-hisparse to the decode server",
        )
    if mode != "decode":
        return
    backend = getattr(given, "disaggregation_transfer_backend", None)
    if backend in SENDS_PAGES and by_token():
        yield Problem(
            f"--disaggregation-transfer-backend {backend} sends pages, and this SGLang's HiSparse takes tokens, so "
            "that KV would come to wrong rows",
            "use mooncake, or SGLang 0.5.13 or later",
        )
    stages = getattr(given, "pp_size", None) or getattr(given, "pipeline_parallel_size", None) or 1
    if stages > 1:  # their KV comes at different times, and to 0.5.12 to no hot buffer
        yield Problem(
            f"--pp-size {stages} with --disaggregation-mode decode: pipeline stages do not agree on when a request's "
            "KV has come or is given up, and would decode apart",
            "use --tp-size instead, or leave --enable-hisparse out",
        )
