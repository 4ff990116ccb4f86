"""What a request asked for, when it joins the batch that decodes out of staging."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from .logprobs import Wanted
from .scenarios import decoded, finish, scenario
from .world import World


@scenario
def logprobs_beside_none(w: World) -> None:
    """One decodes and wants no logprobs; one that does joins it, and then goes on alone."""
    _ask(w, none=None)
    w.run_until(lambda: decoded(w, 3, "none"))
    _ask(w, some=Wanted(), best=Wanted(top=3))
    _answered(w, none=None, some=Wanted(), best=Wanted(top=3))


@scenario
def names_tokens(w: World) -> None:
    """One wants the logprobs of two tokens at each step."""
    _ask(w, named=Wanted(ids=[5, 17]))
    _answered(w, named=Wanted(ids=[5, 17]))


@scenario
def named_beside_none(w: World) -> None:
    """Prefilled and decoding together, one wants logprobs of tokens that it names, others do not."""
    wanted = {"none": None, "named": Wanted(top=1, ids=[5, 17]), "some": Wanted()}
    _ask(w, **wanted)
    _answered(w, **wanted)


@scenario
def prompts_beside_none(w: World) -> None:
    """Two prompts are computed together, and their logprobs wanted; one names tokens, the other does not."""
    wanted = {"some": Wanted(), "named": Wanted(ids=[5, 17])}
    _ask(w, **wanted)
    for req in w.requests.values():
        req.logprob_start_len = 0
    _answered(w, **wanted)


@scenario
def joins_as_prefilled(w: World) -> None:
    """The batch out of staging is in each field the one that was prefilled, which SGLang merges without HiSparse."""
    _ask(w, none=None, some=Wanted(), best=Wanted(top=3))
    sampling = {"temperature": 0.7, "top_p": 0.8, "min_p": 0.1, "frequency_penalty": 0.5}
    others = {"presence_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {"7": 1.5}}
    for rid, values in {"none": sampling, "some": others, "best": sampling | others}.items():
        for name, value in values.items():
            setattr(w.requests[rid].sampling_params, name, value)
    w.requests["best"].return_hidden_states = True
    prefilled: list[ScheduleBatch] = []
    prepare = ScheduleBatch.prepare_for_extend

    def prepared(batch: ScheduleBatch) -> None:
        prepare(batch)
        prefilled.append(copy.copy(batch))
        prefilled[-1].sampling_info = copy.copy(batch.sampling_info)  # to which running it adds

    with mock.patch.object(ScheduleBatch, "prepare_for_extend", prepared):
        w.run_until(lambda: all(map(w.staging, w.requests)))
    (without,) = prefilled
    joining = w.scheduler._build_hisparse_decode_batch(list(w.requests.values()))
    for name in sorted(_merged() - RELAYED):
        for what in _unlike(getattr(joining, name), getattr(without, name), name):
            w.expect(False, what)
    _answered(w, none=None, some=Wanted(), best=Wanted(top=3))


@scenario
def mrope_positions(w: World) -> None:
    """A model with multimodal rotary positions counts them by the images of each request, here none, in every step."""
    forward = w.scheduler.model_worker.forward_batch_generation

    def counted(batch, **more):
        if batch.forward_mode.is_decode():
            inputs = object.__new__(ForwardBatch)
            inputs.forward_mode, inputs.seq_lens = batch.forward_mode, batch.seq_lens
            inputs.seq_lens_cpu = batch.seq_lens_cpu
            inputs._compute_mrope_positions(SimpleNamespace(device="cpu"), batch)
            right = (batch.seq_lens - 1).expand(3, -1)
            w.expect(inputs.mrope_positions.equal(right), f"positions {inputs.mrope_positions}, not {right}")
        return forward(batch, **more)

    w.scheduler.model_worker.forward_batch_generation = counted
    _ask(w, first=None)
    w.run_until(lambda: decoded(w, 3, "first"))
    _ask(w, later=None)
    _answered(w, first=None, later=None)


RELAYED = {"input_ids", "output_ids"}
"""The token that each has got, which may be on its way from the device yet: answers tell whether it is right."""


def _ask(w: World, **wanted: Wanted | None) -> None:
    for rid, what in wanted.items():
        w.submit(rid, prompt=60 + len(w.requests), output=12, **what.fields if what else {})


def _answered(w: World, **wanted: Wanted | None) -> None:
    """Everybody's client got what it asked for."""
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests))
    finish(w)
    for rid, what in wanted.items():
        for wrong in w.logprobs(rid).wrong(what, list(w.requests[rid].output_ids)):
            w.expect(False, f"{rid}: {wrong}")


def _merged() -> set[str]:
    """The fields that SGLang takes of a batch which joins another."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(ScheduleBatch.merge_batch)))
    reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    names = {node.attr for node in reads if isinstance(node.value, ast.Name) and node.value.id == "other"}
    return names & {field.name for field in dataclasses.fields(ScheduleBatch)}


def _unlike(ours: object, theirs: object, where: str) -> Iterator[str]:
    """Where two values differ, part by part."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        same = ours.dtype == theirs.dtype and ours.equal(theirs)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        for key in (ours.keys() | theirs.keys()) - {"_orchestrator_ref", "_batch_ref"}:  # who it belongs to
            yield from _unlike(ours.get(key), theirs.get(key), f"{where}.{getattr(key, '__name__', key)}")
        return
    elif type(ours) is type(theirs) and "sglang.srt.sampling" in type(ours).__module__:
        yield from _unlike(vars(ours), vars(theirs), where)
        return
    else:
        same = ours == theirs
    if not same:
        yield f"{where} is {str(ours)[:60]}, not {str(theirs)[:60]}"
