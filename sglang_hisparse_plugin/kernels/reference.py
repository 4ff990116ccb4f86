"""The swap-in op in plain torch: the CPU's implementation, and the fallback where no CUDA compiler is found.

It writes the same tables in the same order as the CUDA kernel. It is not CUDA-graph capturable: the number of
misses decides the shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import counters as count

# What SGLang's tables hold for a token without a host row. Any row may be copied for it: here it is the last.
NO_HOST_ROW = -1


def swap_in(
    *,
    top_k_tokens: Tensor,
    device_buffer_tokens: Tensor,
    host_cache_locs: Tensor,
    device_buffer_locs: Tensor,
    host_cache: Tensor,
    device_buffer: Tensor,
    top_k_device_locs: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    lru_slots: Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    num_real_reqs: Tensor | None = None,
    tail_start: Tensor | None = None,
    miss_src: Tensor | None = None,
    miss_dst: Tensor | None = None,
    miss_count: Tensor | None = None,
    counters: Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """Same arguments, same effects as :func:`sglang_hisparse_plugin.kernels.swap_in.swap_in`.

    Everything is planned before anything is written, so a call that raises changes nothing.

    Raises:
        ValueError: a value in a table or index names a request, token or row that is not there.
    """
    batch = top_k_tokens.size(0)
    real = batch if num_real_reqs is None else min(batch, int(num_real_reqs[0]))
    rids, lengths = req_pool_indices.tolist(), seq_lens.tolist()
    tails = lengths if tail_start is None else tail_start.tolist()
    all_slots = torch.arange(hot_buffer_size, device=lru_slots.device)
    planned: dict[int, _Tables] = {}
    answers, copies = [], []
    for row in range(real):
        rid = rids[row]
        if not 0 <= rid < lru_slots.size(0):
            raise ValueError(f"req_pool_indices[{row}] is {rid}: the tables have {lru_slots.size(0)} requests")
        tables = planned.setdefault(
            rid, _Tables(device_buffer_tokens[rid].clone(), lru_slots[rid, :hot_buffer_size].clone())
        )
        if lengths[row] > hot_buffer_size and not torch.equal(tables.lru.long().sort().values, all_slots):
            raise ValueError(f"lru_slots of request {rid} do not hold each slot from 0 to {hot_buffer_size - 1} once")
        slots, missed, victims = _plan(
            top_k_tokens[row, :num_top_k].long(),
            *tables,
            seq_len=lengths[row],
            tail=tails[row],
            hot=hot_buffer_size,
        )
        locs = device_buffer_locs[rid]
        found = (slots >= 0) & (slots < locs.size(0))
        answers.append((found.sum(), torch.where(found, locs[torch.where(found, slots, 0)], -1)))
        _inside("top_k_tokens that are missed", missed, host_cache_locs.size(1), "host_cache_locs")
        src, dst = host_cache_locs[rid][missed], locs[victims]
        if not skip_io:
            _inside("host_cache_locs", src, host_cache.size(0), "host_cache", least=NO_HOST_ROW)
            _inside("device_buffer_locs", dst, device_buffer.size(0), "device_buffer")
        copies.append((src, dst))

    top_k_device_locs[:batch, :num_top_k] = -1
    if miss_count is not None:
        miss_count[:batch] = 0
    for rid, tables in planned.items():
        device_buffer_tokens[rid], lru_slots[rid, :hot_buffer_size] = tables
    for row, ((found, locs), (src, dst)) in enumerate(zip(answers, copies, strict=True)):
        top_k_device_locs[row, :num_top_k] = locs
        misses = src.numel()
        if misses and not skip_io:
            _copy_rows(host_cache, device_buffer, src, dst, item_size_bytes)
        if miss_src is not None and miss_dst is not None and miss_count is not None:
            miss_src[row, :misses], miss_dst[row, :misses], miss_count[row] = src, dst, misses
        if counters is not None:
            served = [int(found) - misses, misses, misses * item_size_bytes, 1]
            counters[: count.MISSES] += torch.tensor(served, device=counters.device)
            counters[count.MISSES + count.miss_bucket(misses)] += 1


def copy_planned(
    *,
    miss_src: Tensor,
    miss_dst: Tensor,
    miss_count: Tensor,
    num_real_reqs: Tensor | None,
    host_cache: Tensor,
    device_buffer: Tensor,
    item_size_bytes: int,
) -> None:
    """Same effects as :func:`sglang_hisparse_plugin.kernels.swap_in.copy_planned`.

    Raises:
        ValueError: a count or a row of the plan is out of range; nothing was copied.
    """
    real = miss_count.size(0) if num_real_reqs is None else min(miss_count.size(0), max(0, int(num_real_reqs[0])))
    width = min(miss_src.size(1), miss_dst.size(1))
    copies = []
    for row, misses in enumerate(miss_count[:real].tolist()):
        if not 0 <= misses <= width:
            raise ValueError(f"miss_count[{row}] is {misses}: the plan has room for {width}")
        copies.append((miss_src[row, :misses], miss_dst[row, :misses]))
        _inside("miss_src", copies[-1][0], host_cache.size(0), "host_cache", least=NO_HOST_ROW)
        _inside("miss_dst", copies[-1][1], device_buffer.size(0), "device_buffer")
    for src, dst in copies:
        _copy_rows(host_cache, device_buffer, src, dst, item_size_bytes)


class _Tables(NamedTuple):
    """One request's rows, as a call leaves them."""

    buffer_tokens: Tensor
    lru: Tensor


def _inside(name: str, values: Tensor, size: int, of: str, least: int = 0) -> None:
    wrong = values[(values < least) | (values >= size)]
    if wrong.numel():
        raise ValueError(f"{name}: {int(wrong[0])} is not in {of}, which has {size}")


def _plan(
    tokens: Tensor, buffer_tokens: Tensor, lru: Tensor, *, seq_len: int, tail: int, hot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find a slot for each selected token and update `buffer_tokens` and `lru` (one request's rows) in place.

    Returns the slot of every entry (-1: none), the missed tokens in top-k order and the slots they take.
    """
    index = torch.arange(tokens.numel(), device=tokens.device)
    valid = (tokens >= 0) & (tokens < seq_len)
    in_tail = valid & (tokens >= tail)
    slots = torch.where(in_tail, hot + 1 + tokens - tail, -1)
    nothing = tokens[:0]
    if seq_len <= hot:  # the whole sequence still lies in the buffer, in order
        return torch.where(valid & ~in_tail, tokens, slots), nothing, nothing

    newest = valid & ~in_tail & (tokens == seq_len - 1)
    slots = torch.where(newest, hot, slots)
    searched = valid & ~in_tail & ~newest
    # first[t]: where token t first stands in the top-k; `absent` where it does not.
    absent = tokens.numel()
    first = torch.full((seq_len,), absent, dtype=torch.int64, device=tokens.device)
    first.scatter_reduce_(0, tokens[searched], index[searched], "amin")

    order = lru.long()
    held = buffer_tokens[order].long()
    known = (held >= 0) & (held < seq_len)
    entry = torch.where(known, first[torch.where(known, held, 0)], absent)
    hit = entry < absent
    slots[entry[hit]] = order[hit]

    missed = searched & (slots < 0) & (first[torch.where(searched, tokens, 0)] == index)
    missed_tokens = tokens[missed]
    evictable = order[~hit]
    victims, stale = evictable[: missed_tokens.numel()], evictable[missed_tokens.numel() :]
    slots[missed] = victims
    buffer_tokens[victims] = missed_tokens.to(buffer_tokens.dtype)
    lru.copy_(torch.cat([stale, victims, order[hit]]))  # next to be evicted ... most recently used

    slots[searched] = slots[first[tokens[searched]]]  # repeated entries share the first one's slot
    return slots, missed_tokens, victims


def _copy_rows(source: Tensor, target: Tensor, src: Tensor, dst: Tensor, item_size_bytes: int) -> None:
    rows = _bytes(source)[src.to(source.device), :item_size_bytes]
    _bytes(target)[dst.to(target.device).long(), :item_size_bytes] = rows.to(target.device)


def _bytes(cache: Tensor) -> Tensor:
    """View [rows, ...] of any dtype as [rows, bytes], whatever the strides; a copy would lose the writes."""
    size = cache.element_size()
    shape = (cache.size(0), cache[0].numel() * size)
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return raw.set_(cache.untyped_storage(), cache.storage_offset() * size, shape, (cache.stride(0) * size, 1))
