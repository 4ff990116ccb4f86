"""Logprobs that clients want: what a model gives SGLang's own sampler for them, and what they must have got.

A model's logits here are `HEIGHT` for the right next token and 0 for every other, so that each logprob is known.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req

from sglang_hisparse_plugin import upstream

from .server import VOCABULARY

HEIGHT = 20.0
OTHERS = -math.log(math.exp(HEIGHT) + VOCABULARY - 1)
"""The logprob of every token but the right one."""
COLUMNS = {name: f"output_{name}_logprobs_idx" for name in ("token", "top", "token_ids")}


@dataclass
class Wanted:
    """What a request asks for; `fields` are those of SGLang's message and of its `Req`."""

    top: int = 0
    ids: list[int] | None = None

    @property
    def fields(self) -> dict[str, object]:
        return {"return_logprob": True, "top_logprobs_num": self.top, "token_ids_logprob": self.ids}


@dataclass
class Got:
    """What its client was sent, a list per column with an entry for each token."""

    values: list[float] = field(default_factory=list)
    columns: dict[str, list] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add(self, reply, row: int) -> None:
        self.values += reply.output_token_logprobs_val[row] or []
        for name, column in COLUMNS.items():
            self.columns[name] += (getattr(reply, column) or {row: []})[row] or []

    def wrong(self, wanted: Wanted | None, tokens: list[int]) -> Iterator[str]:
        """What a client did not want, or not get, of a request that answered with `tokens`."""
        if wanted is None:
            if self.values or any(self.columns.values()):
                yield "logprobs were sent that nobody wanted"
            return
        if self.columns["token"] != tokens:
            yield f"logprobs of {self.columns['token']} for the tokens {tokens}"
        if any(abs(value - HEIGHT - OTHERS) > 1e-3 for value in self.values) or len(self.values) != len(tokens):
            yield f"logprobs {self.values}"
        tops = [(len(best), best[:1]) for best in self.columns["top"]]
        if tops != ([(wanted.top, [token]) for token in tokens] if wanted.top else []):
            yield f"top logprobs {tops}, {wanted.top} wanted"
        if self.columns["token_ids"] != ([wanted.ids] * len(tokens) if wanted.ids else []):
            yield f"logprobs of the ids {self.columns['token_ids']}, each time {wanted.ids} wanted"


def sampled(sampler, batch, lengths: list[int], tokens: torch.Tensor) -> LogitsProcessorOutput:
    """A model's output for a batch, with what SGLang's sampler adds to it for those who want logprobs.

    Args:
        lengths: tokens of each request that were computed.
        tokens: the right next token of each, (n,) int64.
    """
    if not batch.return_logprob:
        return LogitsProcessorOutput(next_token_logits=None)
    logits = torch.zeros(len(tokens), VOCABULARY).scatter_(1, tokens[:, None], HEIGHT)
    output = LogitsProcessorOutput(next_token_logits=logits)
    if not batch.forward_mode.is_decode():  # of the prompt nobody wants any, but of what was retracted SGLang counts
        counts = [n - at for n, at in zip(lengths, batch.extend_logprob_start_lens, strict=True)]
        output.input_token_logprobs = torch.zeros(sum(counts))
        if any(batch.token_ids_logprobs):
            output.input_token_ids_logprobs_val, output.input_token_ids_logprobs_idx = _of_prompts(
                batch.token_ids_logprobs, counts
            )
    wanted = batch.top_logprobs_nums, batch.token_ids_logprobs
    found = sampler(output, batch.sampling_info, True, *wanted, batch.seq_lens - 1)
    assert found.equal(tokens), f"SGLang's sampler found {found}, not {tokens}"
    output.next_token_logits = None
    return output


def _of_prompts(named: list[list[int] | None], counts: list[int]) -> tuple[list, list]:
    """Of so many tokens of each prompt, as SGLang's own `LogitsProcessor` looks them up; all are alike here."""
    gather = next(filter(None, (importlib.util.find_spec(module) for module in upstream.LOGPROBS)))
    module = importlib.import_module(gather.name)
    return module.get_token_ids_logprobs_raw(
        torch.zeros(sum(counts), VOCABULARY), named, module.LogprobStage.PREFILL, counts
    )


def no_prompt(req: Req) -> None:
    """Have no logprobs of the prompt, as a request that came from the tokenizer has none."""
    req.logprob_start_len = len(req.origin_input_ids)
