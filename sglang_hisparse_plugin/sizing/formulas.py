"""What SGLang allocates for HiSparse on one rank, tensor by tensor, to the byte. Standard library only.

``tests/sizing`` compares names and bytes with every tensor reachable from the real pools, allocators and coordinator of
each release. The records themselves, with their sources, are in ``records.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .records import RECORDS, Place, host_tokens, index_pages, kv_rows, request_rows, row_tokens, scratch_slots
from .shapes import Server, SizingError

__all__ = [
    "Allocation",
    "allocations",
    "cell_bytes",
    "check",
    "draft_bytes_per_slot",
    "draft_pool_bytes",
    "host_tokens",
    "kv_rows",
    "pinned_bytes",
    "plain_device_bytes",
    "plain_layers_with_index",
    "request_rows",
    "row_tokens",
    "scratch_slots",
    "total",
]


@dataclass(frozen=True)
class Allocation:
    """One tensor, or one per layer."""

    owner: str
    name: str
    place: Place
    bytes: int


def allocations(server: Server) -> Iterator[Allocation]:
    """Every tensor of one rank's pools and tables, HiSparse on; none of 0 bytes."""
    for record in RECORDS:
        if record.holds_in(server.version) and (size := record.size(server)):
            yield Allocation(record.owner, record.name, record.place, size)


def total(server: Server, place: Place) -> int:
    """Bytes of one rank on `place`. On the host nearly all of it is pinned."""
    return sum(item.bytes for item in allocations(server) if item.place == place)


def pinned_bytes(server: Server) -> int:
    """Bytes of host memory that one rank registers with CUDA: the host pool's KV rows."""
    return server.model.layers * host_tokens(server) * server.row


# --- without HiSparse ---


def plain_layers_with_index(server: Server) -> int:
    """Layers that keep index keys without HiSparse: from 0.5.18 not those that share (_should_elide_dsa_index_k)."""
    shared = sum(server.model.shared_index) if server.version >= (0, 5, 18) else 0
    return server.model.layers - shared


def plain_device_bytes(server: Server) -> int:
    """Bytes on the device with the same slots and requests and no HiSparse (NSATokenToKVPool / DSATokenToKVPool)."""
    page, tokens = server.hisparse.page_size, server.device_tokens
    index = plain_layers_with_index(server) * index_pages(server, tokens) * page * server.model.index_bytes
    pointers = 8 * server.model.layers + 8 * (tokens // page)
    return kv_rows(server) + index + pointers + 4 * request_rows(server) * row_tokens(server)


# --- what SGLang itself reckons with when it divides the memory ---


def cell_bytes(server: Server) -> int:
    """Bytes per device slot by which SGLang turns memory into slots.

    To 0.5.16 (get_cell_size_per_token, then DefaultPoolConfigurator._compute_cell_size): fp8 rows count as 576 bytes
    and index keys once, though each host token has one. From 0.5.17 both are right. What it leaves out - the tables per
    request always - comes out of the memory that --mem-fraction-static leaves free.
    """
    model, layers = server.model, server.model.layers
    if server.version >= (0, 5, 17):
        cell = layers * (server.row + model.index_bytes * server.hisparse.host_to_device_ratio)
        return cell + (draft_bytes_per_slot(server) if server.draft_tokens else 0)
    element = 1 if server.kv_dtype == "fp8_e4m3" else 2
    return layers * ((model.kv_lora_rank + model.qk_rope_head_dim) * element + model.index_bytes)


def draft_bytes_per_slot(server: Server) -> int:
    """Bytes per device slot of the draft model's pool, which is dense over the logical slots (0.5.22 and later)."""
    return (
        max(1, server.model.draft_layers)
        * (server.row + server.model.index_bytes)
        * server.hisparse.host_to_device_ratio
    )


def draft_pool_bytes(server: Server) -> int:
    """Bytes on the device of the draft model's own pool, which is dense over the logical slots.

    As SGLang 0.5.22 and later build it (_build_dsa_kv_pool of a draft worker); 0 without draft tokens.
    """
    model, page, tokens = server.model, server.hisparse.page_size, server.logical_tokens
    if not server.draft_tokens:
        return 0
    each = (tokens + page) * server.row + index_pages(server, tokens) * page * model.index_bytes
    return max(1, model.draft_layers) * each


def check(server: Server) -> None:
    """Raise what SGLang would raise of these values at start.

    Raises:
        SizingError: the combination is refused.
    """
    hisparse, rows = server.hisparse, request_rows(server)
    if server.kv_dtype == "fp8_e4m3" and server.version < (0, 5, 12):
        raise SizingError(f"SGLang {server.release} has HiSparse for bfloat16 KV only: fp8_e4m3 came with 0.5.12")
    if not server.draft_tokens:
        return
    if (0, 5, 16) <= server.version < (0, 5, 22):
        raise SizingError(
            f"nothing serves speculation with HiSparse on SGLang {server.release}: take 0.5.10 to 0.5.15 with this "
            "plugin, or 0.5.22 and later, or leave out --draft-tokens"
        )
    if server.draft_tokens == 1:
        raise SizingError("1 draft token is the one that is known, so that none is verified: give 2 or more")
    selected = server.draft_tokens * hisparse.top_k
    if server.version < (0, 5, 22):  # the plugin's own speculation: speculative/limits.py
        if selected > hisparse.device_buffer_size:
            raise SizingError(
                f"{server.draft_tokens} draft tokens select up to {selected} rows, and device_buffer_size is "
                f"{hisparse.device_buffer_size}: give {selected} or more in --hisparse-config"
            )
        return
    if not 2 <= server.draft_tokens <= 4 or hisparse.top_k < 1024 or selected > 8192:
        raise SizingError(
            f"{server.draft_tokens} draft tokens with top_k {hisparse.top_k}: SGLang {server.release} takes 2 to 4, "
            "top_k from 1024 on, and a product of at most 8192"
        )
    if rows > hisparse.device_buffer_size:
        raise SizingError(
            f"{rows} request rows are more than device_buffer_size {hisparse.device_buffer_size}: when it speculates, "
            f"SGLang {server.release} refuses that; lower --max-running-requests"
        )
