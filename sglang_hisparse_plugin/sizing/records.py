"""One record per tensor that SGLang allocates for HiSparse: name, place, size, and the releases that have it so.

Sources are given as class and file of the release that is named first; files move, see ``upstream``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .shapes import Server, version

Place = Literal["device", "host"]
Size = Callable[[Server], int]
FOR_EVER = (999,)


@dataclass(frozen=True)
class Record:
    """One tensor of a range of releases."""

    owner: str
    name: str
    place: Place
    size: Size
    """Bytes on one rank; 0 where this server does not have it."""
    since: str = "0.5.10"
    until: str = ""
    """The first release that has it no longer, or under another name."""

    def holds_in(self, release: tuple[int, ...]) -> bool:
        return version(self.since) <= release < (version(self.until) if self.until else FOR_EVER)


# --- lengths that several tensors share ---


def request_rows(s: Server) -> int:
    """Rows of every table with one per request (ReqToTokenPool.__init__): from 0.5.11 one more, for padding."""
    return s.requests + (s.version >= (0, 5, 11))


def row_tokens(s: Server) -> int:
    """Columns of req_to_token: the context and headroom (0.5.13: get_req_to_token_extra_context_len)."""
    headroom = 4 + s.draft_tokens
    if s.draft_tokens and s.version >= (0, 5, 22):
        headroom = max(headroom, 2 * s.draft_tokens + s.hisparse.page_size - 1)
    return s.context + headroom


def host_tokens(s: Server) -> int:
    """Slots of the host pool: more than a whole number of host pages (HostKVCache.__init__), of one token to 0.5.12."""
    page = s.hisparse.page_size if s.version >= (0, 5, 13) else 1
    return (s.logical_tokens // page + 1) * page


def index_pages(s: Server, tokens: int) -> int:
    page = s.hisparse.page_size
    return (tokens + page + 1) // page


def kv_rows(s: Server) -> int:
    return s.model.layers * (s.device_tokens + s.hisparse.page_size) * s.row


def _index(s: Server) -> int:
    return s.model.layers * index_pages(s, s.logical_tokens) * s.hisparse.page_size * s.model.index_bytes


def _per_layer(bytes_each: int) -> Size:
    return lambda s: s.model.layers * bytes_each


def _per_request(bytes_each: int) -> Size:
    return lambda s: request_rows(s) * bytes_each


def _host(bytes_each: int) -> Size:
    return lambda s: host_tokens(s) * bytes_each


def _top_k(bytes_each: int) -> Size:
    return lambda s: request_rows(s) * s.hisparse.top_k * bytes_each


def _buffer_table(s: Server) -> int:
    return 4 * s.model.layers * request_rows(s) * s.hisparse.padded_buffer


def _host_columns(s: Server) -> int:
    return row_tokens(s) + (s.hisparse.page_size if s.version >= (0, 5, 13) else 0)


def _plan(bytes_each: int, per_entry: bool = True) -> Size:
    """A miss plan is kept where some layers share their top-k (_init_shared_index_prefetch)."""

    def size(s: Server) -> int:
        if not any(s.model.shared_index):
            return 0
        return request_rows(s) * bytes_each * (s.hisparse.top_k * max(1, s.draft_tokens) if per_entry else 1)

    return size


# --- speculative decoding, from 0.5.22 (HiSparseSpecSwapManager.__init__) ---


def scratch_slots(s: Server) -> int:
    """Device slots a request holds besides its hot buffer while it speculates."""
    if not s.draft_tokens or s.version < (0, 5, 22):
        return 0
    selected = s.draft_tokens * s.hisparse.top_k
    return min(selected, max(1024, selected - s.hisparse.device_buffer_size))


def _hash_size(s: Server) -> int:
    return 1 << max(1, (2 * s.hisparse.device_buffer_size - 1).bit_length())


def _spec(size: Size) -> Size:
    return lambda s: size(s) if s.draft_tokens else 0


def _scratch_state(s: Server) -> int:
    width = max(4 * request_rows(s), 5 * s.draft_tokens * s.hisparse.top_k)
    return 4 * (request_rows(s) + 1) * width


RECORDS = (
    # HiSparseNSATokenToKVPool / HiSparseDSATokenToKVPool (mem_cache/hisparse_memory_pool.py, memory_pool.py)
    Record("_kvcache", "kv_buffer", "device", kv_rows),
    Record("_kvcache", "index_k_with_scale_buffer", "device", _index, until="0.5.18"),
    Record("index_key_cache", "buffer", "device", _index, since="0.5.18"),
    Record("_kvcache", "data_ptrs", "device", _per_layer(8)),
    Record("_kvcache", "data_strides", "device", _per_layer(8), since="0.5.22"),
    # HiSparseTokenToKVPoolAllocator (mem_cache/hisparse_memory_pool.py; from 0.5.13 allocator/hisparse.py)
    Record(
        "_kvcache",
        "full_to_hisparse_device_index_mapping",
        "device",
        lambda s: 8 * (s.logical_tokens + s.hisparse.page_size + 1),
    ),
    Record("logical_attn_allocator", "free_pages", "device", lambda s: 8 * (s.logical_tokens // s.hisparse.page_size)),
    Record("hisparse_attn_allocator", "free_pages", "device", lambda s: 8 * (s.device_tokens // s.hisparse.page_size)),
    # ReqToTokenPool (mem_cache/memory_pool.py)
    Record("req_to_token_pool", "req_to_token", "device", lambda s: 4 * request_rows(s) * row_tokens(s)),
    Record("req_to_token_pool", "req_generation", "host", _per_request(8), since="0.5.16"),
    # MLATokenToKVPoolHost (mem_cache/memory_pool_host.py; from 0.5.18 pool_host/mla.py)
    Record("mem_pool_host", "kv_buffer", "host", lambda s: s.model.layers * host_tokens(s) * s.row),
    Record("mem_pool_host", "mem_state", "host", _host(1)),
    Record("mem_pool_host", "free_slots", "host", _host(8)),
    Record("mem_pool_host", "slot_used", "host", _host(1), since="0.5.15"),
    Record("mem_pool_host", "data_ptrs", "device", _per_layer(8)),
    # HiSparseCoordinator.__init__ (managers/hisparse_coordinator.py)
    Record("coordinator", "req_to_device_buffer", "device", lambda s: 8 * request_rows(s) * s.hisparse.padded_buffer),
    Record("coordinator", "req_device_buffer_size", "host", _per_request(8)),
    Record("coordinator", "req_to_host_pool", "device", lambda s: 8 * request_rows(s) * _host_columns(s)),
    Record("coordinator", "req_to_host_pool_allocated_len", "host", _per_request(8), since="0.5.13"),
    Record("coordinator", "req_device_buffer_tokens", "device", _buffer_table),
    Record("coordinator", "req_device_buffer_token_locs", "device", _buffer_table),
    Record("coordinator", "_lru_init", "device", lambda s: 2 * s.hisparse.device_buffer_size),
    Record(
        "coordinator",
        "lru_slots",
        "device",
        lambda s: 2 * s.model.layers * request_rows(s) * s.hisparse.device_buffer_size,
    ),
    Record(
        "coordinator",
        "_device_buffer_arange_i32",
        "device",
        lambda s: 4 * s.hisparse.device_buffer_size,
        since="0.5.12",
    ),
    Record("coordinator", "top_k_device_locs_buffer", "device", _top_k(4)),
    Record("coordinator", "raw_indices_buffer", "device", _top_k(4), since="0.5.12"),
    Record("coordinator", "num_real_reqs", "device", lambda s: 4),
    Record("coordinator", "_miss_src", "device", _plan(8), since="0.5.18"),
    Record("coordinator", "_miss_dst", "device", _plan(4), since="0.5.18"),
    Record("coordinator", "_miss_count", "device", _plan(4, per_entry=False), since="0.5.18"),
    # HiSparseSpecSwapManager.__init__ (managers/hisparse_coordinator.py)
    Record(
        "spec_swap",
        "_cache_index",
        "device",
        _spec(lambda s: 16 * s.model.layers * request_rows(s) * _hash_size(s)),
        since="0.5.22",
    ),
    Record(
        "spec_swap",
        "_cache_policy",
        "device",
        _spec(lambda s: 4 * s.model.layers * (request_rows(s) + 1) * s.hisparse.device_buffer_size),
        since="0.5.22",
    ),
    Record("spec_swap", "_scratch_state", "device", _spec(_scratch_state), since="0.5.22"),
    Record(
        "spec_swap",
        "req_to_scratch",
        "device",
        lambda s: 4 * s.model.layers * request_rows(s) * scratch_slots(s),
        since="0.5.22",
    ),
    Record("spec_swap", "_hash_slots", "device", _spec(lambda s: 8 * s.hisparse.device_buffer_size), since="0.5.22"),
    Record("spec_swap", "_hash_entries", "device", _spec(lambda s: 8 * s.hisparse.device_buffer_size), since="0.5.22"),
    Record(
        "spec_swap",
        "top_k_device_locs",
        "device",
        _spec(lambda s: 4 * request_rows(s) * s.draft_tokens * s.hisparse.top_k),
        since="0.5.22",
    ),
)
