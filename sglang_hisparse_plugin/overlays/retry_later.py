"""The answer to a request that a PD decode worker retracts and has no KV of to resume from."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from .. import upstream

MESSAGE = "Retracted under memory pressure, and HiSparse keeps no KV to resume from. Retry later."


def reason(message: str = MESSAGE) -> Any:
    """The end of such a request."""
    return upstream.aborted(message, status_code=HTTPStatus.SERVICE_UNAVAILABLE)


def answer(scheduler: Any, req: Any, message: str = MESSAGE) -> None:
    """End a request that holds nothing and is in no queue."""
    req.finished_reason = reason(message)
    req.finished_output = True  # with overlap, the step under way has its results streamed after this answer
    upstream.answer_abort(scheduler, req, req.finished_reason.to_json())
