"""The CPU's stand-ins for verification by sampling, against cases worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_hisparse_plugin.demo.cpu import speculative_sampling as kernels

#: After the last token 1 is as likely as 2; after draft 1, token 3 is certain.
TARGET = torch.tensor([[[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0], [0.25, 0.25, 0.25, 0.25]]])


def verify(drafts: list[int], coins: list[float], last: float, **thresholds: float) -> tuple[list[int], list[int], int]:
    """What follows each token, places of the accepted ones, drafts accepted."""
    predicts, places = torch.full((3,), -1, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
    accepted = torch.zeros(1, dtype=torch.int32)
    kernels.tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=places,
        accept_token_num=accepted,
        candidates=torch.tensor([[0, *drafts]]),
        uniform_samples=torch.tensor([coins]),
        uniform_samples_for_final_sampling=torch.tensor([last]),
        target_probs=TARGET,
        draft_probs=torch.zeros_like(TARGET),
        deterministic=True,
        **thresholds,
    )
    return predicts.tolist(), places[0].tolist(), int(accepted)


def test_what_is_certain_is_accepted_and_the_token_after_it_drawn() -> None:
    assert verify([1, 3], [0.4, 0.9, 0.0], last=0.6) == ([1, 3, 2], [0, 1, 2], 2)


def test_a_draft_whose_coin_is_too_high_is_replaced_by_another() -> None:
    assert verify([1, 3], [0.6, 0.0, 0.0], last=0.1) == ([2, -1, -1], [0, -1, -1], 0)


def test_an_impossible_draft_is_rejected_with_what_comes_after_it() -> None:
    assert verify([1, 2], [0.4, 0.0001, 0.0], last=0.0) == ([1, 3, -1], [0, 1, -1], 1)


def test_thresholds_make_it_easier() -> None:
    assert verify([1, 3], [0.6, 0.9, 0.0], last=0.99, threshold_acc=0.5)[2] == 2
    assert verify([1, 3], [0.6, 0.9, 0.0], last=0.99, threshold_single=0.5)[2] == 2


def test_drafts_are_accepted_as_often_as_the_model_would_choose_them() -> None:
    coins = torch.rand(2000, generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(verify([1, 3], [coin, 0.0, 0.0], last=0.0)[2] > 0 for coin in coins) == pytest.approx(1000, abs=100)


@pytest.mark.parametrize(("top_k", "right"), [(2, [0.0, 0.6, 0.4, 0.0]), (1 << 30, [0.1, 0.45, 0.3, 0.15])])
def test_the_likeliest_so_many(top_k: int, right: list[float]) -> None:
    close(kernels.top_k_renorm_prob(PROBS, torch.tensor([top_k])), right)


@pytest.mark.parametrize(
    ("top_p", "right"), [(0.4, [0.0, 1.0, 0.0, 0.0]), (0.5, [0.0, 0.6, 0.4, 0.0]), (1.0, [0.1, 0.45, 0.3, 0.15])]
)
def test_the_likeliest_that_are_so_probable_together(top_p: float, right: list[float]) -> None:
    close(kernels.top_p_renorm_prob(PROBS, torch.tensor([top_p])), right)


PROBS = torch.tensor([[0.1, 0.45, 0.3, 0.15]])


def close(got: Tensor, right: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor([right]))
