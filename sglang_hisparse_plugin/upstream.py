"""Where things live in which SGLang release. The only file that knows; it imports SGLang only when a function runs."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from .patching.source import FunctionSource, Rebound, SourceTree

BATCH = "sglang.srt.managers.schedule_batch"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator"
DECODE = "sglang.srt.disaggregation.decode"
SCHEDULER = "sglang.srt.managers.scheduler"
#: Where the flag --enable-hisparse is declared: the first to 0.5.19, from 0.5.20 below the second.
ARGUMENTS = ("sglang.srt.server_args", "sglang.srt.arg_groups")

#: The class that processes a batch's result: a mixin of the scheduler to 0.5.12, a component of it from 0.5.13.
RESULT_PROCESSORS = (
    ("sglang.srt.managers.scheduler_output_processor_mixin", "SchedulerOutputProcessorMixin"),
    ("sglang.srt.managers.scheduler_components.batch_result_processor", "SchedulerBatchResultProcessor"),
)


# --- in the source ---


def has_hisparse(tree: SourceTree) -> bool:
    """Whether `HiSparseCoordinator` is where it is known to be."""
    return tree.has_class(COORDINATOR, "HiSparseCoordinator")


def lacks_hisparse(tree: SourceTree) -> bool:
    """Whether this is an SGLang that has no HiSparse (0.5.9 and earlier): neither the coordinator nor the flag."""
    if tree.has_module(COORDINATOR) or not tree.has_module(ARGUMENTS[0]):
        return False
    return not any(tree.mentions(place, "enable_hisparse") for place in ARGUMENTS)


def coordinator_method(tree: SourceTree, name: str) -> FunctionSource | None:
    """A method of `HiSparseCoordinator`."""
    return tree.function(COORDINATOR, f"HiSparseCoordinator.{name}")


def scheduler_method(tree: SourceTree, name: str) -> FunctionSource | None:
    """A method that class `Scheduler` defines itself."""
    return tree.function(SCHEDULER, f"Scheduler.{name}")


def release_req(tree: SourceTree) -> FunctionSource | None:
    """What takes a request's slots away: a function from 0.5.13, before that the method of `ScheduleBatch`."""
    return tree.function(BATCH, "release_req") or tree.function(BATCH, "ScheduleBatch.release_req")


def result_method(tree: SourceTree, name: str) -> FunctionSource | None:
    """A method of the class that processes batch results."""
    places = (tree.function(module, f"{owner}.{name}") for module, owner in RESULT_PROCESSORS)
    return next((found for found in places if found), None)


def decode_method(tree: SourceTree, name: str) -> FunctionSource | None:
    """A method that the decode side of PD disaggregation mixes into the scheduler."""
    return tree.function(DECODE, f"SchedulerDisaggregationDecodeMixin.{name}")


# --- in the running process ---


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


def slot(req: Any) -> int | None:
    """The row of a request in `req_to_token_pool`; None when it holds none. In ``req.kv`` from 0.5.19."""
    owner = req if hasattr(req, "req_pool_idx") else req.kv
    index: int | None = owner.req_pool_idx
    return index


def allocated_len(req: Any) -> int:
    """Logical KV slots a request that has a row holds. In ``req.kv`` from 0.5.16."""
    owner = req if hasattr(req, "kv_allocated_len") else req.kv
    return int(owner.kv_allocated_len)


def mapping_of(coordinator: Any, req: Any) -> tuple[Any, Any]:
    """The table from logical to device slots, (logical slots,) int64, and a request's positions in it, (n,) int64."""
    pool = coordinator.mem_pool_device
    logical = coordinator.req_to_token_pool.req_to_token[slot(req), : allocated_len(req)].long()
    if hasattr(
        pool, "translate_loc_from_full_to_compressed"
    ):  # from 0.5.12, for pools that keep one row per few tokens
        logical = pool.translate_loc_from_full_to_compressed(logical)
    return pool.full_to_hisparse_device_index_mapping, logical


def retract(scheduler: Any, reqs: list[Any]) -> None:
    """Take the slots of requests that are in no batch and put them back into the waiting queue, as a pause does."""
    release = importlib.import_module(BATCH).ScheduleBatch
    batch = release(reqs=reqs)
    batch.req_to_token_pool = scheduler.req_to_token_pool
    batch.token_to_kv_pool_allocator = scheduler.token_to_kv_pool_allocator
    batch.tree_cache = scheduler.tree_cache
    batch.hisparse_coordinator = scheduler.hisparse_coordinator
    takes_args = "server_args" in inspect.signature(release.release_req).parameters  # to 0.5.18
    for i in range(len(reqs)):
        batch.release_req(i, len(reqs) - i, **({"server_args": scheduler.server_args} if takes_args else {}))
    for req in reqs:
        scheduler._add_request_to_queue(req)
