"""SGLang's swap-in kernel in plain torch: same arguments, same effects, one request at a time."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adapt(module: ModuleType) -> None:
    """Set in SGLang's wrapper module, before the coordinator imports the function by name."""
    module.load_cache_to_device_buffer_mla = load_cache_to_device_buffer_mla  # type: ignore[attr-defined]


def load_cache_to_device_buffer_mla(
    top_k_tokens: Any,
    device_buffer_tokens: Any,
    host_cache_locs: Any,
    device_buffer_locs: Any,
    host_cache: Any,
    device_buffer: Any,
    top_k_device_locs: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    lru_slots: Any,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    num_real_reqs: Any = None,
    **launch: Any,
) -> None:
    """Placeholder until the package's reference op is wired in."""
    import torch

    count = top_k_tokens.size(0) if num_real_reqs is None else int(num_real_reqs[0])
    source = host_cache.reshape(host_cache.shape[0], -1)
    target = device_buffer.reshape(device_buffer.shape[0], -1)
    for row in range(count):
        slot, length = int(req_pool_indices[row]), int(seq_lens[row])
        wanted = top_k_tokens[row].long()
        valid = wanted >= 0
        locs = device_buffer_locs[slot].long()
        out = torch.full_like(wanted, -1)
        if length <= hot_buffer_size:
            out[valid] = locs[wanted[valid]]
        else:
            newest = wanted == length - 1
            out[newest] = locs[hot_buffer_size]
            tokens = device_buffer_tokens[slot, :hot_buffer_size]
            where = {int(t): i for i, t in enumerate(tokens.tolist()) if t >= 0}
            asked = [int(t) for t in wanted[valid & ~newest].tolist()]
            order = lru_slots[slot].long().tolist()
            hits = {where[t] for t in asked if t in where}
            misses = [t for t in dict.fromkeys(asked) if t not in where]
            victims = [s for s in order if s not in hits][: len(misses)]
            for token, victim in zip(misses, victims):
                where = {t: s for t, s in where.items() if s != victim}
                where[token] = victim
                tokens[victim] = token
                target[locs[victim]] = source[host_cache_locs[slot, token]]
            taken = set(victims)
            order = [s for s in order if s not in hits and s not in taken] + victims + [s for s in order if s in hits]
            lru_slots[slot] = torch.tensor(order, dtype=lru_slots.dtype)
            for i in (valid & ~newest).nonzero().flatten().tolist():
                out[i] = locs[where[int(wanted[i])]]
        top_k_device_locs[row, : out.numel()] = out.to(top_k_device_locs.dtype)
