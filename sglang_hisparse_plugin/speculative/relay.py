"""What the draft model left after a prefill reaches the first decode step, past staging."""

from __future__ import annotations

import copy
from typing import Any

import torch

#: Fields of SGLang's draft input that hold one row per request, by all their names: bonus_tokens was verified_id.
ROWS = (
    "topk_p",
    "topk_index",
    "hidden_states",
    "bonus_tokens",
    "verified_id",
    "new_seq_lens",
    "draft_probs",
    "dsa_topk_indices",
)


def keep(batch: Any, result: Any) -> None:
    """Leave with each request of a prefill batch that is now staged its part of the draft model's answer."""
    draft = getattr(result, "next_draft_input", None) or batch.spec_info
    for i, req in enumerate(batch.reqs):
        if req.hisparse_staging:
            req.hisparse_draft_input = _select(draft, i)


def _select(draft: Any, i: int) -> Any:
    """A draft input of request `i` alone, which holds nothing else of the batch."""
    one = copy.copy(draft)
    for name in ROWS:
        rows = getattr(draft, name, None)
        if rows is not None:
            setattr(one, name, rows[i : i + 1].clone())
    return one


def join(reqs: list[Any]) -> Any:
    """One draft input for requests that start to decode together, in their order."""
    parts = [req.__dict__.pop("hisparse_draft_input") for req in reqs]
    joined = copy.copy(parts[0])
    for name in ROWS:
        if getattr(joined, name, None) is not None:
            setattr(joined, name, torch.cat([getattr(part, name) for part in parts]))
    return joined
