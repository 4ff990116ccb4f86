"""What probes read: SGLang's functions on disk, wherever a release keeps them."""

from __future__ import annotations

from ..patching.source import FunctionSource, SourceTree
from .places import ALLOCATORS, ARGUMENTS, BATCH, COORDINATOR, DECODE, RESULT_PROCESSORS, SCHEDULER


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


def allocator_method(tree: SourceTree, name: str) -> FunctionSource | None:
    """A method of the allocator that hands out logical and device slots together."""
    places = (tree.function(module, f"HiSparseTokenToKVPoolAllocator.{name}") for module in ALLOCATORS)
    return next((found for found in places if found), None)


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
