"""Where things live in which SGLang release. The only file that knows; it imports SGLang only when a function runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

from .patching.source import FunctionSource, Rebound, SourceTree

CACHE = "sglang.srt.mem_cache.common"
BATCH = "sglang.srt.managers.schedule_batch"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator"
DECODE = "sglang.srt.disaggregation.decode"
#: Where logprobs are gathered: in the first to 0.5.15, in the second from 0.5.16.
LOGPROBS = ("sglang.srt.layers.utils.logprob", "sglang.srt.layers.logprob_processor")
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
POLICY = "sglang.srt.managers.schedule_policy"
SCHEDULER = "sglang.srt.managers.scheduler"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
#: Where HiSparse's allocator is: in the first to 0.5.13, in the second from 0.5.14.
ALLOCATORS = ("sglang.srt.mem_cache.hisparse_memory_pool", "sglang.srt.mem_cache.allocator.hisparse")
#: Where the flag --enable-hisparse is declared: the first to 0.5.19, from 0.5.20 below the second.
ARGUMENTS = ("sglang.srt.server_args", "sglang.srt.arg_groups")
#: Where arguments that HiSparse does not go with are refused, from 0.5.20.
ARGUMENTS_OF_HISPARSE = "sglang.srt.arg_groups.hisparse_hook"

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


def committed_len(req: Any) -> int:
    """Of those, slots of tokens that are known to be right: fewer with speculation. In ``req.kv`` from 0.5.16."""
    owner = req if hasattr(req, "kv_committed_len") else req.kv
    return int(owner.kv_committed_len)


def token_ids_logprob(req: Any) -> Any:
    """Ids of which a request wants a logprob in every step, None without. In ``req.logprob`` from 0.5.13."""
    return (req if hasattr(req, "token_ids_logprob") else req.logprob).token_ids_logprob


def mapping_of(coordinator: Any, req: Any) -> tuple[Any, Any]:
    """The table from logical to device slots, (logical slots,) int64, and a request's positions in it, (n,) int64."""
    pool = coordinator.mem_pool_device
    logical = coordinator.req_to_token_pool.req_to_token[slot(req), : allocated_len(req)].long()
    if hasattr(
        pool, "translate_loc_from_full_to_compressed"
    ):  # from 0.5.12, for pools that keep one row per few tokens
        logical = pool.translate_loc_from_full_to_compressed(logical)
    return pool.full_to_hisparse_device_index_mapping, logical


#: `abort_reason` of a request whose client wanted no answer any more.
CLIENT = "client"
BAD_REQUEST = "BadRequestError"  #: and where SGLang's scheduler itself finds fault with a request


def abort_reason(req: Any) -> str | None:
    """Why a request is being aborted: SGLang's name of the error, or `CLIENT`; None when it is not."""
    reasons: tuple[Any, ...] = (req.finished_reason, getattr(req, "to_finish", None))
    for finish in reasons:
        if type(finish).__name__ == "FINISH_ABORT":
            return str(finish.err_type) if finish.err_type else CLIENT
    return None


def free_slots(scheduler: Any) -> dict[str, int]:
    """Free slots of the device, host and logical pool; host-side bookkeeping, nothing waits for a device."""
    return {name: int(pool.available_size()) for name, pool in pools(scheduler.hisparse_coordinator).items()}


def pools(coordinator: Any) -> dict[str, Any]:
    """The device, host and logical pool, each with `size` and `available_size()` in slots."""
    allocator = coordinator.token_to_kv_pool_allocator
    return {
        "device": allocator.hisparse_attn_allocator,
        "host": coordinator.mem_pool_host,
        "logical": allocator.logical_attn_allocator,
    }


def row_bytes(coordinator: Any) -> int:
    """Bytes of a token's row in one layer. An attribute of the coordinator from 0.5.12."""
    if hasattr(coordinator, "item_size_bytes"):
        return int(coordinator.item_size_bytes)
    return int(coordinator.mem_pool_host.token_stride_size)


def metric_labels(scheduler: Any) -> dict[str, Any] | None:
    """Labels of SGLang's own metrics of this scheduler; None where it exports none.

    What says so is an attribute of the scheduler to 0.5.14, after that of its metrics reporter.
    """
    reporter = getattr(scheduler, "metrics_reporter", scheduler)
    if not reporter.current_scheduler_metrics_enabled:
        return None
    return dict(scheduler.metrics_collector.labels)


def retract(scheduler: Any, reqs: list[Any]) -> None:
    """Take the slots of requests that are in no batch and put them back into the waiting queue, as a pause does."""
    release(scheduler, reqs)
    for req in reqs:
        scheduler._add_request_to_queue(req)


def batch_of(scheduler: Any, reqs: list[Any]) -> Any:
    """Requests that are in no batch, in one: enough of one to release them."""
    batch = importlib.import_module(BATCH).ScheduleBatch(reqs=reqs)
    batch.req_to_token_pool = scheduler.req_to_token_pool
    batch.token_to_kv_pool_allocator = scheduler.token_to_kv_pool_allocator
    batch.tree_cache = scheduler.tree_cache
    batch.hisparse_coordinator = scheduler.hisparse_coordinator
    return batch


def release(scheduler: Any, reqs: list[Any]) -> None:
    """Take the slots of requests that are in no batch, as a retraction does."""
    batch = batch_of(scheduler, reqs)
    takes_args = "server_args" in inspect.signature(batch.release_req).parameters  # to 0.5.18
    for i in range(len(reqs)):
        batch.release_req(i, len(reqs) - i, **({"server_args": scheduler.server_args} if takes_args else {}))


#: For a request that can never be served. To 0.5.22 SGLang makes an HTTP error of 400, 500 and 503 only, and answers
#: 200 with any other; routers and clients send again what ends with one of the last two.
NEVER = HTTPStatus.BAD_REQUEST


def refuse(scheduler: Any, req: Any, message: str) -> None:
    """End a request that waits, with an error for its client.

    As SGLang does with one that it takes exception to, not by an AbortReq: to 0.5.12 the tokenizer keeps the request.
    """
    scheduler.waiting_queue.remove(req)
    importlib.import_module("sglang.srt.disaggregation.utils").prepare_abort(req, message, status_code=NEVER)
    getattr(scheduler, "output_streamer", scheduler).stream_output([req], req.return_logprob)  # its own from 0.5.13


def budget_of(adder: Any) -> Any:
    """What holds the allocator that a prefill adder asks how much is free: its budget from 0.5.21."""
    return getattr(adder, "memory_budget", adder)


def no_room() -> Any:
    """What the prefill adder answers when memory is out."""
    return importlib.import_module(POLICY).AddReqResult.NO_TOKEN


def act(finish_event: Any, req: Any) -> Any:
    """An entry of the staging queue."""
    return importlib.import_module(COORDINATOR).HiSparseAct(finish_event, finish_event, req)


def prefills(worker: Any) -> bool:
    """Whether a worker computes prompts; a decode instance of PD disaggregation gets them with their KV."""
    return bool(worker.model_runner.server_args.disaggregation_mode != "decode")


def speculates(coordinator: Any) -> bool:
    """Whether draft tokens are verified, by SGLang (from 0.5.22) or by this package."""
    native = getattr(coordinator, "spec_swap", None)
    return hasattr(coordinator, "verify_rows") or bool(native and native.enabled)


def waits_for_device(coordinator: Any) -> bool:
    """Whether one in staging whose buffer finds no room stays there: this package's speculation sees to it."""
    return hasattr(coordinator, "verify_rows")


def scratch(coordinator: Any, slot: int | None) -> int:
    """Device slots that SGLang's own speculation, from 0.5.22, has yet to take for a request besides its buffer."""
    native = getattr(coordinator, "spec_swap", None)
    if not native or not native.enabled or slot in native._scratch_reqs:
        return 0
    return int(native.scratch_capacity)


#: Where SGLang says how many slots a step that speculates takes: the last to 0.5.12, the first from 0.5.16.
STEP_SIZES = ("sglang.srt.mem_cache.allocation_sizing", CACHE, "sglang.srt.managers.utils")


def tokens_ahead(holder: Any) -> int:
    """Positions past its tokens for which a request has slots in a step that speculates; 0 without speculation.

    Spec v2 takes the slots of two steps at a time; spec v1, to 0.5.12 where nothing overlaps, those of one.

    Args:
        holder: a scheduler or a batch.
    """
    if holder.spec_algorithm is None or holder.spec_algorithm.is_none():
        return 0
    places = (vars(sys.modules[name]) for name in STEP_SIZES if name in sys.modules)
    once = int(next(found for place in places if (found := place.get("get_alloc_len_per_decode")))())
    v1 = not holder.enable_overlap and importlib.util.find_spec("sglang.srt.speculative.eagle_worker") is not None
    return once if v1 else 2 * once


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


def pass_in_flight(scheduler: Any) -> bool:
    """Whether the last pass had requests of this rank: under DP attention it joins others with an idle batch.

    A pipeline stage keeps its last batches for good, but nobody in flight there has ended: `holders` names them all.
    """
    last = scheduler.last_batch
    return not hasattr(scheduler, "last_mbs") and last is not None and bool(last.reqs)


def pipeline_stages() -> int:
    """Of this server."""
    group = vars(importlib.import_module("sglang.srt.distributed.parallel_state"))["_PP"]
    return 1 if group is None else int(group.world_size)


def is_hisparse(allocator: Any) -> bool:
    """Whether this is the allocator of a HiSparse pool."""
    return hasattr(allocator, "hisparse_attn_allocator")


def device_tokens(allocator: Any) -> int:
    """Tokens of which the device pool holds the KV; DeepSeek-V4 keeps one row per few tokens."""
    return int(allocator.hisparse_attn_allocator.size) * int(getattr(allocator, "compress_ratio", 1))


def answer_abort(scheduler: Any, req: Any, reason: dict[str, Any]) -> None:
    """Tell the tokenizer that a request outside of any batch has ended. By way of the scheduler itself to 0.5.14."""
    message = importlib.import_module("sglang.srt.managers.io_struct").AbortReq(rid=req.rid, finished_reason=reason)
    getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer.send_output(message, req)


def poll_state(name: str) -> int:
    """A state of a PD transfer as its receiver reports it."""
    return int(getattr(importlib.import_module("sglang.srt.disaggregation.base").KVPoll, name))


def means(abort: Any, req: Any) -> bool:
    """Whether a message to abort is about a request."""
    return bool(abort.abort_all or req.rid.startswith(abort.rid))


@contextlib.contextmanager
def left_out(queue: Any, entries: list[Any]) -> Iterator[None]:
    """Meanwhile these entries are not in a queue."""
    queue.queue = [entry for entry in queue.queue if not any(entry is other for other in entries)]
    try:
        yield
    finally:
        queue.queue += entries


def reserve_host(coordinator: Any, slot: int, start: int, stop: int) -> None:
    """Give positions start .. stop-1 of a request host slots. The host pool has pages, and counts them, from 0.5.13.

    Raises:
        RuntimeError: the host pool is empty.
    """
    c, pool = coordinator, coordinator.mem_pool_host
    if hasattr(pool, "alloc_paged_token_slots"):
        pool.alloc_paged_token_slots(c.req_to_host_pool, c.req_to_host_pool_allocated_len, slot, start, stop - start)
        return
    rows = pool.alloc(stop - start)
    if rows is None:
        raise RuntimeError(f"HiSparse: the host pool has no room for {stop - start} draft tokens")
    c.req_to_host_pool[slot, start:stop] = rows.to(c.req_to_host_pool.device)


def paged(coordinator: Any, tokens: int) -> int:
    """`tokens` rounded up to whole pages of the device pool."""
    page = int(coordinator.mem_pool_device.page_size)
    return -(-tokens // page) * page


def host_slots_for(coordinator: Any, rows: int) -> int:
    """Host slots of a request with `rows` rows in the host pool."""
    if host_reserved(coordinator) is None:
        return rows
    page = int(coordinator.mem_pool_host.page_size)
    return -(-rows // page) * page


def host_slots_held(coordinator: Any, req: Any) -> int:
    """Host slots that a request has.

    To 0.5.12 SGLang does not count them: told from how far it is, or one too few; while it speculates, counted by us.
    """
    row, reserved = slot(req), host_reserved(coordinator)
    if row is None:
        return 0
    if reserved is not None:
        return int(reserved[row])
    if speculates(coordinator) and (counted := coordinator.verify_rows.reserved(row)):
        return int(counted)
    decodes = int(coordinator.req_device_buffer_size[row]) > 0
    return allocated_len(req) - decodes if decodes or getattr(req, "hisparse_staging", False) else 0


def host_missing(coordinator: Any, slots: Sequence[int], rows: Sequence[int]) -> int:
    """Host slots to allocate for requests that are about to have `rows` rows in the host pool, one more than before.

    Rows are allocated one by one to 0.5.12, page by page from 0.5.13.
    """
    reserved = host_reserved(coordinator)
    if reserved is None:
        return len(rows)
    pairs = zip(rows, reserved[slots].tolist(), strict=True)
    return sum(host_slots_for(coordinator, n) - held for n, held in pairs if n > held)


def host_reserved(coordinator: Any) -> Any:
    """[request slots] on the CPU: positions of each that have a host slot. The coordinator counts them from 0.5.13."""
    return getattr(coordinator, "req_to_host_pool_allocated_len", None)


def free_host(coordinator: Any, slot: int, start: int, stop: int) -> None:
    """Free the host slots of positions start .. stop-1, where the host pool has no pages: up to 0.5.12."""
    c = coordinator
    if start < stop:
        rows = c.req_to_host_pool[slot, start:stop]
        c.mem_pool_host.free(rows.clone())
        rows.fill_(-1)


def back_up(coordinator: Any, host: Any, device: Any) -> None:
    """Copy device rows to host rows in all layers; `settled` waits for it. On a stream of its own from 0.5.11."""
    c = coordinator
    copy = functools.partial(
        c.mem_pool_host.backup_from_device_all_layer, c.mem_pool_device, host, device, io_backend="kernel"
    )
    if not hasattr(c, "decode_backup_stream"):
        copy()
        return
    module = sys.modules[COORDINATOR].device_module
    c.wait_for_pending_backup()
    now = module.current_stream()
    with module.stream(c.decode_backup_stream):
        c.decode_backup_stream.wait_stream(now)
        copy()
        c._backup_done_event.record()
        for rows in (host, device):
            if rows.is_cuda:
                rows.record_stream(c.decode_backup_stream)
    c._has_pending_backup = True


def settled(coordinator: Any) -> None:
    """Let the current stream wait for `back_up`."""
    if hasattr(coordinator, "wait_for_pending_backup"):
        coordinator.wait_for_pending_backup()


def hand_over_draft(scheduler: Any, batch: Any, draft: Any) -> None:
    """Give a batch that starts to decode its draft input, by way of the future map where batches overlap."""
    batch.spec_info = draft
    if getattr(batch, "output_ids", None) is not None:  # to 0.5.12, where spec v2 asks the last input for its device
        batch.input_ids = batch.output_ids
    if getattr(batch, "req_pool_indices_cpu", batch) is None:  # 0.5.13 leaves it out, and looks lengths up by it
        batch.req_pool_indices_cpu = batch.req_pool_indices.cpu()
    if not scheduler.enable_overlap:
        return
    futures = scheduler.future_map
    if hasattr(futures, "alloc_future_indices"):  # to 0.5.12: a ring, in which what a prefill left is soon written over
        draft.future_indices = futures.alloc_future_indices(batch.batch_size())
        futures.store_to_map_for_new_batch(draft.future_indices, draft)
    else:  # by request slot: what the prefill left is there
        draft.future_indices = batch.req_pool_indices


@contextlib.contextmanager
def relay_untouched(scheduler: Any) -> Iterator[None]:
    """The future map keeps what it has: from 0.5.13 a batch out of staging writes its last tokens there."""
    futures = scheduler.future_map
    if not hasattr(futures, "stash"):
        yield
        return
    futures.stash = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        del futures.stash


def draft_tokens() -> int:
    """Draft tokens of a step, the one that is known included; 0 without speculation."""
    arguments = sys.modules["sglang.srt.server_args"].get_global_server_args()
    asked = (arguments.speculative_algorithm or "NONE").upper() != "NONE"
    return int(arguments.speculative_num_draft_tokens or 0) if asked else 0


def finds_next_token_layer(architecture: str) -> bool:
    """Whether SGLang takes a model's own layer for its drafts; DeepSeek-V3.2's from 0.5.12."""
    config = sys.modules["sglang.srt.configs.model_config"].ModelConfig
    return architecture in inspect.getsource(config._config_draft_model)


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has made of arguments what they mean; from 0.5.19 on it does so after they are built."""
    return bool(getattr(server_args, "_resolution_finished", not hasattr(server_args, "resolve_once")))


def resolved(server_args: Any) -> Any:
    """What arguments mean to SGLang, which from 0.5.19 on keeps it beside what was given."""
    if not hasattr(server_args, "resolve_once"):
        return server_args
    return importlib.import_module("sglang.srt.arg_groups.overrides").resolved_view(server_args)


def model_and_top_k(server_args: Any, tree: SourceTree, top_k: int) -> tuple[list[str], int]:
    """Architectures of the model that a server is started with, and tokens that a query selects.

    Args:
        top_k: of ``--hisparse-config``, by which SGLang goes to 0.5.11; later by the model.
    """
    if hasattr(server_args, "get_model_config"):
        model = server_args.get_model_config()
    else:  # from 0.5.19
        model = importlib.import_module("sglang.srt.arg_groups.overrides").model_config_of(server_args)
    if tree.mentions("sglang.srt.model_executor.model_runner", "hisparse_top_k"):
        top_k = getattr(model.hf_text_config, "index_topk", top_k)
    return list(model.hf_config.architectures or ()), int(top_k)
