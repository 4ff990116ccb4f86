"""A request: what it holds, why it ends, and how it is put back or refused."""

from __future__ import annotations

import importlib
import inspect
import sys
from http import HTTPStatus
from typing import Any

from .places import BATCH


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


def means(abort: Any, req: Any) -> bool:
    """Whether a message to abort is about a request."""
    return bool(abort.abort_all or req.rid.startswith(abort.rid))


def retract(scheduler: Any, reqs: list[Any]) -> list[Any]:
    """Take the slots of requests that are in no batch, and queue these again as SGLang does after a retraction.

    Returns:
        those that SGLang cannot resume: a PD decode worker, from 0.5.22. They are in no queue.
    """
    resumable = release(scheduler, reqs)
    scheduler.waiting_queue = [one for one in scheduler.waiting_queue if not any(one is req for req in reqs)]
    for req, resumes in zip(reqs, resumable, strict=True):
        if resumes:
            scheduler._add_request_to_queue(req, is_retracted=True)
    return [req for req, resumes in zip(reqs, resumable, strict=True) if not resumes]


def batch_of(scheduler: Any, reqs: list[Any]) -> Any:
    """Requests that are in no batch, in one: enough of one to release them."""
    batch = importlib.import_module(BATCH).ScheduleBatch(reqs=reqs)
    batch.req_to_token_pool = scheduler.req_to_token_pool
    batch.token_to_kv_pool_allocator = scheduler.token_to_kv_pool_allocator
    batch.tree_cache = scheduler.tree_cache
    batch.hisparse_coordinator = scheduler.hisparse_coordinator
    return batch


def release(scheduler: Any, reqs: list[Any]) -> list[bool]:
    """Take the slots of requests that are in no batch, as a retraction does.

    Returns:
        whether each can be resumed; SGLang itself says so from 0.5.22.
    """
    batch = batch_of(scheduler, reqs)
    takes_args = "server_args" in inspect.signature(batch.release_req).parameters  # to 0.5.18
    args = {"server_args": scheduler.server_args} if takes_args else {}
    return [batch.release_req(i, len(reqs) - i, **args) is not False for i in range(len(reqs))]


def resumable(batch: Any, req: Any) -> bool:
    """Whether a request that SGLang has released can be resumed, by what it asks of who is retracted, from 0.5.22."""
    names = vars(sys.modules[BATCH])
    if "backup_kv_cache" not in names or names["get_disagg"]().disaggregation_mode != "decode":
        return True
    backend = names["get_disagg"]().disaggregation_decode_retraction_backup
    pools = batch.req_to_token_pool, batch.token_to_kv_pool_allocator
    return bool(names["backup_kv_cache"](req, batch.tree_cache, *pools, backend))


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


def aborted(*how: Any, **more: Any) -> Any:
    """SGLang's finish reason of a request that is aborted: a message, and the status_code of the answer."""
    return importlib.import_module(BATCH).FINISH_ABORT(*how, **more)


def answer_abort(scheduler: Any, req: Any, reason: dict[str, Any]) -> None:
    """Tell the tokenizer that a request outside of any batch has ended. By way of the scheduler itself to 0.5.14."""
    message = importlib.import_module("sglang.srt.managers.io_struct").AbortReq(rid=req.rid, finished_reason=reason)
    if hasattr(scheduler, "send_abort_output"):  # from 0.5.23, where the tokenizer may be another
        scheduler.send_abort_output(message, req)
        return
    getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer.send_output(message, req)
