"""SGLang's swap-in kernel, replaced by the package's reference op in plain torch, which counts here what it does."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

_counters: list[Any] = []  # the op's counters


def counts() -> dict[str, int]:
    """What all swap-ins of this process did together, over requests and layers."""
    values = _counters[0][:3].tolist() if _counters else [0, 0, 0]
    return dict(zip(("hits", "misses", "bytes"), values, strict=True))


def adapt(module: ModuleType) -> None:
    """Set in SGLang's wrapper module, before the coordinator imports the functions by name."""
    for function in (load_cache_to_device_buffer_mla, copy_cache_planned_mla, load_cache_to_device_buffer_spec_mla):
        setattr(module, function.__name__, function)


def adapt_reference(module: ModuleType) -> None:
    """Let the reference op count, whoever calls it."""
    wrapt.wrap_function_wrapper(module, "swap_in", _counted)


def load_cache_to_device_buffer_mla(*, page_size: int = 1, block_size: int = 256, **arguments: Any) -> None:
    """SGLang's arguments, without those of a launch."""
    from sglang_hisparse_plugin.kernels import reference

    reference.swap_in(**arguments)


def copy_cache_planned_mla(*, num_blocks: int = 4, block_size: int = 1024, **arguments: Any) -> None:
    """The copy of a recorded plan; `skip_io` and DeepSeek-V4's layout have no use here and are refused."""
    from sglang_hisparse_plugin.kernels import reference

    if arguments.pop("skip_io", False) or arguments.pop("is_dsv4_layout", False):
        raise NotImplementedError("skip_io and DeepSeek-V4's layout have no CPU stand-in")
    reference.copy_planned(**arguments)


def load_cache_to_device_buffer_spec_mla(
    *,
    top_k_tokens: Any,
    device_buffer_tokens: Any,
    host_cache_locs: Any,
    device_buffer_locs: Any,
    host_cache: Any,
    device_buffer: Any,
    top_k_device_locs: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    state: Any,
    num_real_reqs: Any,
    **plan: Any,
) -> None:
    """All queries of a verification at once, as SGLang 0.5.22 and later ask: what one of them selects stays for all.

    Rows go where others lie that no query selects, the first of them first; SGLang's kernel chooses otherwise, and
    exchanges them for rows of its scratch (`state`).
    """
    import torch

    if plan:
        raise NotImplementedError("the plan of a speculative swap-in has no CPU stand-in")
    hot, queries = state.cache_policy.size(1), top_k_tokens.size(1)
    top_k_device_locs.zero_()
    for row in range(int(num_real_reqs[0])):
        slot = int(req_pool_indices[row])
        held, locs, selected = device_buffer_tokens[slot], device_buffer_locs[slot], top_k_tokens[row]
        length = seq_lens.view(-1, queries)[row].unsqueeze(1)
        wanted = (selected >= 0) & (selected < length)
        place = {int(token): i for i, token in enumerate(held.tolist()) if token >= 0}
        asked = torch.unique(selected[wanted]).tolist()
        missed = [token for token in asked if token not in place]
        taken = {place[token] for token in asked if token in place}
        free = (i for i in range(hot) if i not in taken)
        for token in missed:
            place[token] = at = next(free)
            held[at] = token
            device_buffer[int(locs[at])] = host_cache[int(host_cache_locs[slot, token])]
        answers = torch.tensor([int(locs[place[t]]) if t in place else -1 for t in selected.flatten().tolist()])
        top_k_device_locs[row] = answers.view_as(selected).masked_fill(~wanted, -1).to(top_k_device_locs.dtype)


def _counted(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("counters") is None:
        import torch

        from sglang_hisparse_plugin.kernels.counters import COUNTERS

        if not _counters:
            _counters.append(torch.zeros(COUNTERS, dtype=torch.int64))
        kwargs = kwargs | {"counters": _counters[0]}
    return wrapped(*args, **kwargs)
