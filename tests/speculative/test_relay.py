"""What the draft model left after a prefill is kept by request, and joined in the order in which requests go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hisparse_plugin.speculative import relay


def draft(*numbers: int, **more: Any) -> SimpleNamespace:
    """A draft input of requests with these numbers, in every row of theirs."""
    rows = torch.tensor(numbers)
    return SimpleNamespace(
        topk_p=rows[:, None] / 10, topk_index=rows[:, None], hidden_states=rows[:, None].repeat(1, 3), **more
    )


def request(staging: bool = True) -> SimpleNamespace:
    return SimpleNamespace(hisparse_staging=staging)


def kept(*numbers: int, **more: Any) -> list[SimpleNamespace]:
    """Requests of one prefill batch after it."""
    reqs = [request() for _ in numbers]
    relay.keep(SimpleNamespace(reqs=reqs, spec_info=draft(*numbers, **more)), SimpleNamespace())
    return reqs


def test_requests_of_several_prefills_go_on_in_the_order_they_are_given() -> None:
    a, b, c = kept(1, 2, 3)
    (d,) = kept(4)
    joined = relay.join([d, b, a])
    assert joined.topk_index.flatten().tolist() == [4, 2, 1]
    assert joined.hidden_states.tolist() == [[4] * 3, [2] * 3, [1] * 3]
    assert torch.equal(joined.topk_p.flatten(), torch.tensor([4, 2, 1]) / 10)
    assert relay.join([c]).topk_index.tolist() == [[3]]


def test_spec_v2_answers_in_the_result_and_spec_v1_in_the_batch() -> None:
    one, other = request(), request()
    relay.keep(SimpleNamespace(reqs=[one], spec_info=None), SimpleNamespace(next_draft_input=draft(5)))
    relay.keep(SimpleNamespace(reqs=[other], spec_info=draft(6)), SimpleNamespace(next_draft_input=None))
    assert relay.join([one, other]).topk_index.tolist() == [[5], [6]]


@pytest.mark.parametrize("name", ["bonus_tokens", "verified_id", "new_seq_lens", "draft_probs", "dsa_topk_indices"])
def test_rows_by_every_name_they_have_had(name: str) -> None:
    first, second = kept(1, 2, **{name: torch.tensor([[10], [20]])})
    assert getattr(relay.join([second, first]), name).tolist() == [[20], [10]]


def test_what_is_no_row_is_the_same_for_all_and_absent_rows_stay_absent() -> None:
    reqs = kept(1, 2, capture_hidden_mode="last", draft_probs=None)
    joined = relay.join(reqs)
    assert joined.capture_hidden_mode == "last" and joined.draft_probs is None


def test_nothing_is_kept_with_a_request_that_is_not_staged() -> None:
    """It was finished by its first token, or is a part of a prompt that goes on."""
    reqs = [request(), request(staging=False), request()]
    relay.keep(SimpleNamespace(reqs=reqs, spec_info=draft(1, 2, 3)), SimpleNamespace())
    assert not hasattr(reqs[1], "hisparse_draft_input")
    assert relay.join([reqs[0], reqs[2]]).topk_index.tolist() == [[1], [3]]


def test_a_request_keeps_nothing_of_its_batch() -> None:
    """Neither memory of the other rows, nor what SGLang writes to the batch's draft input afterwards."""
    source = draft(1, 2)
    reqs = [request(), request()]
    relay.keep(SimpleNamespace(reqs=reqs, spec_info=source), SimpleNamespace())
    source.topk_index.fill_(99)
    alone = reqs[0].hisparse_draft_input
    assert alone.topk_index.tolist() == [[1]] and alone.hidden_states.untyped_storage().nbytes() == 3 * 8


def test_a_request_retracted_while_staged_brings_what_its_next_prefill_left() -> None:
    (req,) = kept(1)
    relay.keep(SimpleNamespace(reqs=[req], spec_info=draft(7)), SimpleNamespace())
    assert relay.join([req]).topk_index.tolist() == [[7]]
    assert not hasattr(req, "hisparse_draft_input"), "a request that runs holds no memory of the draft model"


def test_a_request_without_a_draft_input_is_an_error_and_no_guess() -> None:
    with pytest.raises(KeyError, match="hisparse_draft_input"):
        relay.join([request()])
