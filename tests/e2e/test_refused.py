"""A request that can never be served: what its client gets from the real server, and that the server forgets it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sglang_hisparse_plugin.demo import language, model, releases, scales, setup
from sglang_hisparse_plugin.demo.server import Server

SCALE = replace(scales.CPU, device_tokens=1024, hot_buffer=1024, long=(900,))
"""A hot buffer and its page are more than the device pool holds; a short prompt's buffer is shorter."""
SHORT, LONG = 300, 1000
RELEASES = ["0.5.12", *(pytest.param(r, marks=pytest.mark.long) for r in ("0.5.10.post1", "0.5.18", "0.5.23"))]


@pytest.fixture(scope="module", params=RELEASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    work = tmp_path_factory.mktemp("refused")
    model.write(work / "model", SCALE.dims)
    target = setup.Target(request.param, releases.fetch(request.param))
    with setup.Launcher(target, SCALE, work / "model", work, lambda _: None).server("refused") as running:
        yield running


def asked(server: Server, path: str, **body: object) -> tuple[int, str]:
    """Status and text of an answer."""
    url, header = f"http://127.0.0.1:{server.port}{path}", {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), header), timeout=120) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def generated(server: Server, length: int, **more: object) -> tuple[int, str]:
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    return asked(server, "/generate", input_ids=language.prompt(length, 7), sampling_params=sampling, **more)


def says_why(text: str) -> bool:
    return "can never be served" in text and "device pool of 1024 slots" in text and "device_buffer_size" in text


def test_an_error_status_and_the_reason(server: Server) -> None:
    status, text = generated(server, LONG)
    assert status == 400 and says_why(json.loads(text)["error"]["message"]), (status, text)


def test_it_is_forgotten(server: Server) -> None:
    """SGLang refuses an id that it still knows."""
    answers = [generated(server, LONG, rid="again") for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0] == 400 and says_why(answers[1][1]), answers


def test_in_a_stream(server: Server) -> None:
    """Its status is sent before anybody knows: the last chunk says what became of it."""
    status, text = generated(server, LONG, stream=True)
    *chunks, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    reason = json.loads(chunks[-1])["meta_info"]["finish_reason"]
    assert (status, len(chunks), done) == (200, 1, "[DONE]"), text
    assert (reason["type"], reason["status_code"]) == ("abort", 400) and says_why(reason["message"]), reason


def test_with_logprobs(server: Server) -> None:
    status, text = generated(server, LONG, return_logprob=True, top_logprobs_num=2)
    assert status == 400 and says_why(text), (status, text)


def test_others_are_answered(server: Server) -> None:
    status, text = generated(server, SHORT)
    assert status == 200 and json.loads(text)["output_ids"] == language.walk(language.prompt(SHORT, 7), 20), text
