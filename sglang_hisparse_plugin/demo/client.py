"""One request over HTTP as a client sees it: whole or streamed, aborted, or left alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """Everything that came back."""

    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    """The type of the finish reason; empty if the stream broke off or was left."""
    error: str = ""
    left: bool = False


class Client:
    """A request of greedy decoding, sent once.

    Args:
        url: of the server.
        rid: the request's id.
        patience: seconds to wait for the next bytes.
        more: further fields of the request.
    """

    def __init__(  # noqa: PLR0917 (what a request is made of)
        self,
        url: str,
        rid: str,
        tokens: list[int],
        steps: int,
        patience: float,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.url, self.rid, self.tokens, self.steps, self.patience = url, rid, tokens, steps, patience
        self.more = more
        self._left = self._aborted = False

    def generate(self) -> Reply:
        """The reply as a whole.

        Raises:
            OSError: there is none.
        """
        try:
            with urllib.request.urlopen(self._request(stream=False), timeout=self.patience) as answer:
                return _add(Reply(), json.load(answer))
        except urllib.error.HTTPError as error:
            return _refusal(error)
        except http.client.HTTPException as error:
            raise ConnectionError(f"half an answer: {error!r}") from error

    def stream(self, after: int | None = None, then: Callable[[], None] = lambda: None) -> Reply:
        """The reply piece by piece; when there are `after` tokens `then` is called, to abort or to leave."""
        reply = Reply()
        try:
            with urllib.request.urlopen(self._request(stream=True), timeout=self.patience) as answer:
                for line in answer:
                    data = line.decode().removeprefix("data:").strip()
                    if data == "[DONE]":
                        break
                    if data:
                        _add(reply, json.loads(data))
                        if after is not None and len(reply.tokens) >= after:
                            then()
                    if self._left:
                        reply.left = True
                        break
        except urllib.error.HTTPError as error:
            return _refusal(error)
        except http.client.HTTPException as error:
            raise ConnectionError(f"half an answer: {error!r}") from error
        return reply

    def abort(self, again: bool = False) -> None:
        """Ask the server to give the request up, once; or `again`, for it forgets whom it did not know yet."""
        if self._aborted and not again:
            return
        self._aborted = True
        body = json.dumps({"rid": self.rid}).encode()
        request = urllib.request.Request(f"{self.url}/abort_request", body, {"Content-Type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=self.patience):
            pass

    def leave(self) -> None:
        """Close the connection after what has just been read."""
        self._left = True

    def send_and_leave(self, after: float) -> None:
        """Close the connection `after` seconds without having read anything."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=self.patience)
        request = self._request(stream=False)
        body = request.data if isinstance(request.data, bytes) else b""
        connection.request("POST", "/generate", body, dict(request.header_items()))
        time.sleep(after)
        connection.close()

    def _request(self, stream: bool) -> urllib.request.Request:
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": self.tokens,
            "stream": stream,
            "sampling_params": sampling(self.tokens, self.steps),
            **self.more,
        }
        return urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )


def sampling(tokens: list[int], steps: int, temperature: float = 0) -> dict[str, Any]:
    """Decoding of `steps` tokens, greedy but for a temperature; EOS, which is no edge, never comes.

    Prompts of an odd length would not ignore it, as those of most clients: SGLang admits them by other estimates.
    """
    return {"temperature": temperature, "max_new_tokens": steps, "ignore_eos": len(tokens) % 2 == 0}


def _refusal(error: urllib.error.HTTPError) -> Reply:
    return Reply(error=error.read().decode(errors="replace") or str(error))


def _add(reply: Reply, part: dict[str, Any]) -> Reply:
    """A part of a stream, or the whole; some releases send all tokens each time, some only the new ones.

    And a stream that is aborted while it waits ends with its last token once more.
    """
    if error := part.get("error"):
        reply.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return reply
    tokens, meta = [int(token) for token in part.get("output_ids") or []], part.get("meta_info", {})
    before = meta.get("completion_tokens", len(reply.tokens) + len(tokens)) - len(tokens)
    again = reply.tokens[before:]
    reply.tokens = reply.tokens[:before] + tokens
    if again != tokens[: len(again)]:
        reply.error = f"tokens {before} to {before + len(again)} were sent again, and others"
        return reply
    if reason := meta.get("finish_reason"):
        reply.ended = reason["type"]
        reply.error = str(reason.get("message", "")) if reason["type"] == "abort" else ""
    return reply
