"""One rank's scheduler: its place among ranks and stages, its batches and queues, and what it is told in answer."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..patching.source import SourceTree
from ..patching.syntax import Rebound
from .places import COORDINATOR, POLICY, SCHEDULER
from .requests import slot
from .source import scheduler_method


def tp_rank(tree: SourceTree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Tensor-parallel rank of the `Scheduler` built with these arguments, `self` apart; 0 where it cannot be told.

    An argument of its own to 0.5.20, after that part of SGLang's global state.
    """
    try:
        init = scheduler_method(tree, "__init__")
    except (Rebound, SyntaxError, ValueError, OSError):
        init = None
    given = {**dict(zip(init.parameters[1:] if init else (), args, strict=False)), **kwargs}
    try:
        rank = given["tp_rank"] if "tp_rank" in given else vars(sys.modules[SCHEDULER])["get_parallel"]().tp_rank
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, AssertionError):  # none, or not set up
        return 0
    return rank if isinstance(rank, int) else 0


def pipeline_stages() -> int:
    """Of this server."""
    group = vars(importlib.import_module("sglang.srt.distributed.parallel_state"))["_PP"]
    return 1 if group is None else int(group.world_size)


def ranks_with_same_requests() -> set[int]:
    """Of all, those that share heads or context with this one; in their order the tensor-parallel rank runs fastest."""
    place = importlib.import_module("sglang.srt.distributed.parallel_state")
    heads, context = place.get_attn_tp_group().ranks, place.get_attn_cp_group().ranks
    mine = importlib.import_module("torch").distributed.get_rank()
    return {head + part - mine for head in heads for part in context}


def prefills(worker: Any) -> bool:
    """Whether a worker computes prompts; a decode instance of PD disaggregation gets them with their KV."""
    return bool(worker.model_runner.server_args.disaggregation_mode != "decode")


def batches(scheduler: Any) -> list[Any]:
    """Every batch: what decodes, what ran last and, on a stage of a pipeline, the same of every microbatch.

    Of those `running_batch` and `last_batch` show one at a time.
    """
    found = [scheduler.running_batch, scheduler.last_batch]
    for name in ("running_mbs", "last_mbs", "mbs"):
        found += getattr(scheduler, name, ())
    return list({id(batch): batch for batch in found if batch is not None}.values())


def holders(scheduler: Any, others: Iterable[Any] = ()) -> list[Any]:
    """Everybody who holds slots, once: in decode, in staging, in a prefill not yet processed, or among `others`."""
    groups = [others, *(batch.reqs for batch in batches(scheduler))]
    groups += [[act.req for act in scheduler.hisparse_coordinator.ack_staging_queue]]
    groups += [[scheduler.chunked_req]] if scheduler.chunked_req is not None else []
    everybody = {id(req): req for group in groups for req in group}.values()
    return [req for req in everybody if slot(req) is not None and not req.finished()]


def finishing(scheduler: Any, batch: Any) -> list[Any]:
    """Requests whose last token the pass in flight makes; SGLang leaves them out of the next one from 0.5.22 on."""
    return list(getattr(scheduler, "_reqs_finishing_inflight", lambda _: [])(batch))


def pass_in_flight(scheduler: Any) -> bool:
    """Whether the last pass had requests of this rank: under DP attention it joins others with an idle batch.

    A pipeline stage keeps its last batches for good, but nobody in flight there has ended: `holders` names them all.
    """
    last = scheduler.last_batch
    return not hasattr(scheduler, "last_mbs") and last is not None and bool(last.reqs)


def act(finish_event: Any, req: Any) -> Any:
    """An entry of the staging queue."""
    return importlib.import_module(COORDINATOR).HiSparseAct(finish_event, finish_event, req)


@contextlib.contextmanager
def left_out(queue: Any, entries: list[Any]) -> Iterator[None]:
    """Meanwhile these entries are not in a queue."""
    queue.queue = [entry for entry in queue.queue if not any(entry is other for other in entries)]
    try:
        yield
    finally:
        queue.queue += entries


def budget_of(adder: Any) -> Any:
    """What holds the allocator that a prefill adder asks how much is free: its budget from 0.5.21."""
    return getattr(adder, "memory_budget", adder)


def no_room() -> Any:
    """What the prefill adder answers when memory is out."""
    return importlib.import_module(POLICY).AddReqResult.NO_TOKEN


def poll_state(name: str) -> int:
    """A state of a PD transfer as its receiver reports it."""
    return int(getattr(importlib.import_module("sglang.srt.disaggregation.base").KVPoll, name))


def metric_labels(scheduler: Any) -> dict[str, Any] | None:
    """Labels of SGLang's own metrics of this scheduler; None where it exports none.

    What says so is an attribute of the scheduler to 0.5.14, after that of its metrics reporter.
    """
    reporter = getattr(scheduler, "metrics_reporter", scheduler)
    if not reporter.current_scheduler_metrics_enabled:
        return None
    return dict(scheduler.metrics_collector.labels)
