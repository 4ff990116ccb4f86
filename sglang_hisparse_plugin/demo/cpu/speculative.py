"""The kernels of EAGLE's draft trees in plain torch, for trees that are chains (`--speculative-eagle-topk 1`)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from . import speculative_sampling


def adapt_kernels(module: ModuleType) -> None:
    """Set the kernels where they are: in the `sgl_kernel` stub, later in a module of SGLang."""
    for function in (build_tree_kernel_efficient, verify_tree_greedy):
        setattr(module, function.__name__, function)


def adapt(module: ModuleType) -> None:
    """Let a module take its CUDA branches: they call the kernels below, or Triton, which is interpreted."""
    module._is_cuda, module._is_cpu = True, False  # type: ignore[attr-defined]
    module.sgl_build_tree_kernel_efficient = build_tree_kernel_efficient  # type: ignore[attr-defined]
    speculative_sampling.adapt(module)


def adapt_overlap(module: ModuleType) -> None:
    """Let the overlap scheduler speculate on a CPU, too: from 0.5.16 on SGLang switches it off there."""
    module._disable_overlap_schedule_for_cpu = lambda server_args: None  # type: ignore[attr-defined]


def build_tree_kernel_efficient(  # noqa: PLR0917 (SGLang's signature)
    parents: Any,
    selected: Any,
    verified_seq_len: Any,
    tree_mask: Any,
    positions: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int = 0,
) -> None:
    """Positions and links of a chain of drafts. Nobody reads the mask: DSA has none.

    Args:
        verified_seq_len: (requests,) int.
        positions: out, (requests * draft_token_num,) int64.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: out, (requests, draft_token_num) int64; a token's
            place in the batch, its child's in the request, its sibling's (-1: none).
    """
    import torch

    if topk != 1:
        raise NotImplementedError("draft trees that are no chains have no CPU stand-in")
    place = torch.arange(draft_token_num)
    positions.copy_((verified_seq_len.unsqueeze(1) + place).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_((place + 1).masked_fill(place == draft_token_num - 1, -1))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy(
    *, predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any, target_predict: Any, **links: Any
) -> None:
    """Accept drafts up to the first that the model would not have chosen.

    Args:
        predicts: out, (requests * tokens or more,) int32: what the model chose after each accepted token.
        accept_index: out, (requests, steps + 1) int32, places in the batch of the accepted tokens; the rest stays -1.
        accept_token_num: out, (requests,) int32, drafts accepted.
        candidates: (requests, tokens) int, the last token and the drafts after it.
        target_predict: (requests, tokens) int, the model's choice after each of them.
    """
    import torch

    requests, tokens = candidates.shape
    right = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    accept_token_num.copy_(right)
    place = torch.arange(tokens)
    taken = place <= right.unsqueeze(1)
    indices = torch.arange(requests * tokens).view(requests, tokens)
    accept_index[:, :tokens] = indices.masked_fill(~taken, -1).to(accept_index.dtype)
    predicts[indices[taken]] = target_predict[taken].to(predicts.dtype)
