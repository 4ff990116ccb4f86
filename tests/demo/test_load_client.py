"""What a client makes of replies: the forms in which releases send them, and how a reply is judged."""

from __future__ import annotations

import pytest

from sglang_hisparse_plugin.demo import language, manners
from sglang_hisparse_plugin.demo.client import Client, Reply, _add

PROMPT = language.prompt(100, seed=1)
RIGHT = language.walk(PROMPT, 4)


@pytest.mark.parametrize(
    "parts", [[[1], [2], [3]], [[1], [1, 2], [1, 2, 3]], [[1, 2], [3]], [[1], [2], [3], [3]], [[1, 2, 3], [3]]]
)
def test_streams_of_new_tokens_and_of_all(parts: list[list[int]]) -> None:
    reply = Reply()
    for tokens in parts:
        _add(reply, {"output_ids": tokens, "meta_info": {"completion_tokens": tokens[-1]}})
    assert (reply.tokens, reply.error) == ([1, 2, 3], "")


def test_tokens_sent_again_must_be_the_same() -> None:
    reply = Reply([1, 2, 3])
    _add(reply, {"output_ids": [2, 4], "meta_info": {"completion_tokens": 3}})
    assert reply.error


def judged(reply: Reply, aborted: bool = False) -> str:
    return manners.judge(Client("", "r", PROMPT, len(RIGHT), 1), reply, aborted)


def test_verdicts() -> None:
    wrong = [*RIGHT[:2], RIGHT[2] + 1, RIGHT[3]]
    assert judged(Reply(RIGHT, "length")) == "exact"
    assert judged(Reply(wrong, "length")) == "ended by length, wrong from step 2"
    assert judged(Reply(RIGHT[:2])) == "ended by nothing, wrong from step 2"
    assert judged(Reply(RIGHT[:2], "abort", "aborted"), aborted=True) == "aborted"
    assert judged(Reply(wrong[:3], "abort"), aborted=True) == "wrong tokens before its abort"
    assert judged(Reply([], "abort", "Retracted. Retry later.")) == "refused"
    assert judged(Reply([], "abort", "out of memory")) == "error: out of memory"
    assert judged(Reply([], "", "Aborted by AbortReq."), aborted=True) == "aborted"
    assert judged(Reply([], "abort", "out of memory"), aborted=True) == "error: out of memory"
    assert judged(Reply([], "abort", "")).startswith("error")
    assert judged(Reply(error="internal")) == "error: internal"
