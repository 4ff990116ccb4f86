"""What SGLang keeps free of a GPU for activations and CUDA graphs, by its own reckoning. Standard library only.

That is what it leaves where --mem-fraction-static is not given (to 0.5.18 ServerArgs._handle_gpu_memory_settings, then
arg_groups/memory_hook.py). ``tests/sizing`` compares it with the fraction that the real ServerArgs of a release sets.
"""

from __future__ import annotations

from .amounts import GIB, MIB

#: MiB of a GPU's memory up to which a chunk of prefill has so many tokens (--chunked-prefill-size by default).
CHUNKS = ((20 << 10, 2048), (60 << 10, 4096), (160 << 10, 8192))
LARGEST_CHUNK = 16384
CONSTANT, PER_CHUNK_TOKEN, PER_GRAPH, PER_RANK = 512, 1.5, 2, 128  # MiB
PREFILL_GRAPHS = 1536  # MiB; not with DP attention, and by some releases not for these models: then it is kept in vain
#: MiB for each request in a CUDA graph and DP attention rank; the second where graphs hold more than GRAPHS_ARE_LARGE.
PER_DP_GRAPH, PER_LARGE_DP_GRAPH, GRAPHS_ARE_LARGE = 3, 4.5, 300
LEAST = 10 << 10  # MiB, on a GPU of more than 60 GiB
DRAFT_MODEL = 4 << 10  # MiB, to 0.5.13; later releases keep nothing for it


def graph_batch(gpu: int, tp: int, requests: int) -> int:
    """Requests in the largest CUDA graph: all that run at once, up to SGLang's own default on a GPU of `gpu` bytes."""
    return min(requests, 256 if tp < 4 and gpu < 160 * GIB else 512)


def reserve(gpu: int, version: tuple[int, ...], *, tp: int, dp_attention: int, requests: int, drafts: bool) -> int:
    """Bytes that SGLang keeps free on a GPU of `gpu` bytes, with CUDA graphs for `requests` of one rank.

    Args:
        dp_attention: ranks of DP attention; 1 without it.
        drafts: whether it speculates with a draft model.
    """
    chunk = next((tokens for most, tokens in CHUNKS if gpu < most * MIB), LARGEST_CHUNK)
    graphs = graph_batch(gpu, tp, requests)
    mib = CONSTANT + PER_CHUNK_TOKEN * chunk + PER_GRAPH * graphs + PER_RANK * tp
    if dp_attention > 1:
        mib += graphs * dp_attention * (PER_LARGE_DP_GRAPH if graphs > GRAPHS_ARE_LARGE else PER_DP_GRAPH)
    else:
        mib += PREFILL_GRAPHS
    if gpu > 60 * GIB:
        mib = max(mib, LEAST)
    if drafts and version < (0, 5, 14):
        mib += DRAFT_MODEL
    return int(mib * MIB)
