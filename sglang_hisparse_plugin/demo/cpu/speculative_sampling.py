"""The kernels that verify a chain of drafts by sampling, in plain torch: for requests with a temperature."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def adapt(module: ModuleType) -> None:
    """Set the kernels where SGLang looks for them, and does not import them without CUDA."""
    for function in (top_k_renorm_prob, top_p_renorm_prob, tree_speculative_sampling_target_only):
        setattr(module, function.__name__, function)


def top_k_renorm_prob(probs: Any, top_ks: Any) -> Any:
    """Probabilities of the `top_ks` (rows,) likeliest of each row of `probs` (rows, vocabulary), scaled to 1."""
    import torch

    ranked, order = probs.sort(dim=-1, descending=True)
    return _of_those(torch.arange(probs.size(-1)) < top_ks.unsqueeze(1), ranked, order)


def top_p_renorm_prob(probs: Any, top_ps: Any) -> Any:
    """Probabilities of the fewest of each row of `probs` (rows, vocabulary) to reach `top_ps` (rows,), scaled to 1."""
    ranked, order = probs.sort(dim=-1, descending=True)
    return _of_those(ranked.cumsum(-1) - ranked < top_ps.unsqueeze(1), ranked, order)


def _of_those(kept: Any, ranked: Any, order: Any) -> Any:
    import torch

    chosen = ranked * kept
    return torch.zeros_like(chosen).scatter(-1, order, chosen / chosen.sum(-1, keepdim=True))


def tree_speculative_sampling_target_only(
    *,
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    uniform_samples: Any,
    uniform_samples_for_final_sampling: Any,
    target_probs: Any,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    **rest: Any,
) -> None:
    """Accept each draft as probably as the model would have chosen it, up to the first that is not; then sample.

    Args:
        predicts: out, (requests * tokens or more,) int32: what follows each accepted token.
        accept_index: out, (requests, steps + 1) int32, places in the batch of the accepted tokens; the rest stays -1.
        accept_token_num: out, (requests,) int32, drafts accepted.
        candidates: (requests, tokens) int, the last token and the drafts after it.
        uniform_samples: (requests, tokens) float in 0 .. 1, a coin for each draft.
        uniform_samples_for_final_sampling: (requests,) float, the coin of the token after them.
        target_probs: (requests, tokens, vocabulary) float, the model's after each of the candidates.
        threshold_single, threshold_acc: a draft is as good as chosen from the one on, or if its coin is below its
            probability by the other.
    """
    requests, tokens = candidates.shape
    for request in range(requests):
        here, accepted = target_probs[request], 0
        left = here[0]
        accept_index[request, 0] = request * tokens
        while accepted < tokens - 1:
            draft = int(candidates[request, accepted + 1])
            likely = float(here[accepted, draft])
            if likely < threshold_single and float(uniform_samples[request, accepted]) >= likely / threshold_acc:
                left = here[accepted].clone()
                left[draft] = 0
                break
            predicts[request * tokens + accepted] = draft
            accepted += 1
            accept_index[request, accepted] = request * tokens + accepted
            left = here[accepted]
        sums = left.cumsum(-1)
        drawn = int((sums <= uniform_samples_for_final_sampling[request] * sums[-1]).sum())
        predicts[request * tokens + accepted] = min(drawn, left.numel() - 1)
        accept_token_num[request] = accepted
