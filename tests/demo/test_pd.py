"""What goes to a prefill and a decode server, and what their demo sees: on servers of this test's own."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hisparse_plugin.demo import language, manners, pd, pd_events, pd_probe, pd_servers, pd_transport, weights
from sglang_hisparse_plugin.demo.pd_servers import Pair
from sglang_hisparse_plugin.demo.pd_transport import Transport
from sglang_hisparse_plugin.demo.report import Report
from sglang_hisparse_plugin.demo.scales import CPU
from sglang_hisparse_plugin.demo.server import Server
from sglang_hisparse_plugin.demo.setup import Launcher, Target

PROMPT = language.prompt(100, seed=1)
RIGHT = language.walk(PROMPT, 4)


class Peer:
    """A server that answers with the right walk: when it is asked, or, `waiting`, when it is told to abort."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.aborts: list[str] = []
        self.waiting = False
        self.deaf = 0
        """So many aborts go unheard."""
        self.statuses: list[int] = []
        """Of the next answers; 200 after these."""
        self._told = threading.Event()
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = peer.abort(body) if self.path == "/abort_request" else peer.generate(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def abort(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.aborts.append(body["rid"])
        if len(self.aborts) > self.deaf:
            self._told.set()
        return 200, {}

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.asked.append(body)
        if self.waiting:
            assert self._told.wait(30)
            return 200, {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "aborted"}}}
        steps = body["sampling_params"]["max_new_tokens"]
        answer = {
            "output_ids": language.walk(body["input_ids"], steps),
            "meta_info": {"finish_reason": {"type": "length"}},
        }
        if self.statuses:
            return self.statuses.pop(0), {"error": {"message": "Retracted. Retry later."}}
        return 200, answer


@pytest.fixture
def peers() -> Iterator[tuple[Peer, Peer]]:
    both = Peer(), Peer()
    yield both
    for peer in both:
        peer.http.shutdown()
        peer.http.server_close()


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    return Launcher(Target("0", tmp_path), CPU, tmp_path / "model", tmp_path, lambda _: None)


@pytest.fixture
def pair(launcher: Launcher, peers: tuple[Peer, Peer]) -> Pair:
    pair = Pair(launcher, Transport("mooncake", True, ""), skip="x")
    pair.decode.port, pair.prefill.port = (peer.http.server_port for peer in peers)
    return pair


def test_a_request_goes_to_both_with_the_place_where_they_meet(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    assert pair.decode.generate(PROMPT, 4).tokens == RIGHT
    assert peers[0].asked == peers[1].asked
    assert peers[0].asked[0]["bootstrap_port"] == pair.bootstrap_port
    assert f"--disaggregation-bootstrap-port={pair.bootstrap_port}" in pair.prefill.command
    assert pair.prefills.answered == 1
    pair.decode.generate(PROMPT, 4)
    assert len({body["bootstrap_room"] for body in peers[0].asked}) == 2


def test_hisparse_is_on_the_decode_server_alone(pair: Pair) -> None:
    assert "--enable-hisparse" in pair.decode.command
    assert "--enable-hisparse" not in pair.prefill.command
    assert "--disaggregation-mode=decode" in pair.decode.command
    assert "--disaggregation-mode=prefill" in pair.prefill.command


def test_an_abort_goes_to_both_once(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    for peer in peers:
        peer.waiting = True
    request = pair.request(PROMPT, 4)
    threading.Timer(0.2, request.abort).start()
    assert request.generate().ended == "abort"
    assert [peer.aborts for peer in peers] == [[request.rid]] * 2


def test_an_abort_that_the_decode_server_missed_is_sent_again(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    """It came before the request; the prefill server had heard of it, and no KV will come."""
    for peer in peers:
        peer.waiting = True
    peers[0].deaf = 1
    assert manners.KINDS["abort at any time"](pair.request(PROMPT, 4), random.Random(0)) == "aborted"
    assert len(peers[0].aborts) == 2


def test_a_prefill_server_that_missed_the_abort_is_told_again(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    peers[1].waiting, peers[1].deaf = True, 1
    assert pair.request(PROMPT, 4).generate().tokens == RIGHT
    assert len(peers[1].aborts) == 2
    assert (pair.prefills.answered, pair.prefills.unanswered) == (1, [])


def test_a_dead_prefill_server_is_noted(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    peers[1].http.shutdown()
    peers[1].http.server_close()
    assert pair.request(PROMPT, 4).generate().tokens == RIGHT
    assert len(pair.prefills.unanswered) == 1


def test_without_a_transport_nothing_is_prefilled(launcher: Launcher, peers: tuple[Peer, Peer]) -> None:
    pair = Pair(launcher, Transport("fake", False, "none"))
    pair.decode.port, pair.prefill.port = (peer.http.server_port for peer in peers)
    pair.request(PROMPT, 4).generate()
    assert peers[0].asked[0]["bootstrap_host"] == pd_servers.NO_PREFILL
    assert not peers[1].asked


def test_why_there_is_no_transport(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = pd_transport.find(launcher)
    assert (found.backend, found.carries) == ("fake", False)
    assert "libibverbs.so.1: no such file" in found.detail
    assert "Install mooncake" in found.detail


def retracted(pair: Pair, log: str) -> tuple[list[Any], Report]:
    report = Report("0")
    pair.decode.log.write_text("")
    prompts = [(PROMPT, 4)] * 3
    answers = pd._retracted(report, _logging(pair, log), prompts)
    return answers, report


def _logging(pair: Pair, log: str) -> Pair:
    """Its decode server's log says `log` from the second look on, and the server is alive."""
    looks = iter(["", log])
    pair.decode.log_text = lambda: next(looks)  # type: ignore[method-assign]
    pair.decode._process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
    return pair


def test_what_is_retracted_is_sent_again(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    peers[0].statuses = [503, 503]
    answers, report = retracted(pair, "#retracted_reqs: 1\n#retracted_reqs: 2\n")
    assert all(walk.exact for walk in answers)
    assert len(peers[0].asked) == 5
    assert report.passed
    assert "2 told to come again, 1 with their KV computed again" in report.checks[0].detail


def test_what_is_retracted_for_ever_is_wrong(pair: Pair, peers: tuple[Peer, Peer]) -> None:
    peers[0].statuses = [503] * 3 * pd.TRIES
    answers, _ = retracted(pair, "")
    assert not any(walk.exact for walk in answers)
    assert len(peers[0].asked) == 3 * pd.TRIES


@pytest.mark.parametrize(("statuses", "log"), [([], ""), ([503, 503], "#retracted_reqs: 1\n")])
def test_retractions_that_were_not_or_not_in_the_log(
    pair: Pair, peers: tuple[Peer, Peer], statuses: list[int], log: str
) -> None:
    peers[0].statuses = statuses
    assert not retracted(pair, log)[1].passed


@pytest.mark.parametrize("name", [pd_probe.sent_id, pd_probe.kept_id])
def test_a_fault_takes_the_digit_of_another_row(name: Any) -> None:
    req = SimpleNamespace(rid=name(1, 2, 0), req_pool_idx=0)
    rows, where = [torch.arange(8 * 200.0).reshape(8, 1, 200) for _ in range(2)], torch.tensor([[7, 6, 5]])
    before = [layer.clone() for layer in rows]
    pool = SimpleNamespace(kv_buffer=rows)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(req_to_token=where),
    )
    coordinator = SimpleNamespace(mem_pool_host=pool, req_to_host_pool=where)
    called: list[Any] = []
    pd_probe._send(lambda *args: called.append(args), scheduler, (req,), {})
    pd_probe._keep(lambda *args: called.append(args), coordinator, (req,), {})
    assert called == [(req,)] * 2
    assert torch.equal(rows[0], before[0])
    changed = (rows[1] != before[1]).nonzero()
    assert set(changed[:, 0].tolist()) == {5}, "the row of position 2"
    assert torch.equal(rows[1][5, 0, weights.ROW_DIGIT], before[1][7, 0, weights.ROW_DIGIT])


def test_waiting_for_slots_in_use_ends() -> None:
    states = iter([{"now": 1, "start": 1}, {"now": 0, "start": 1}])
    server = SimpleNamespace(internal_state=lambda: {"hisparse_demo": next(states)}, patience=30)
    pd_events._holds_something(server)  # type: ignore[arg-type]
    with pytest.raises(StopIteration):
        next(states)


def test_a_restart_is_another_server(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[Server, bool]] = []
    monkeypatch.setattr(Server, "__enter__", lambda server: server)
    monkeypatch.setattr(Server, "stop", lambda server, politely=True: ended.append((server, politely)))
    decode, prefill = pair.decode, pair.prefill
    pair.restart_decode()
    pair.restart_prefill()
    assert ended == [(decode, False), (prefill, False)]
    assert pair.decode.log != decode.log
    assert (decode.env["SGLANG_HISPARSE_PLUGIN_SKIP"], pair.decode.env["SGLANG_HISPARSE_PLUGIN_SKIP"]) == ("x", "")
    assert f"--disaggregation-bootstrap-port={pair.bootstrap_port}" in pair.prefill.command


def test_an_interruption_waits_for_no_answer(
    pair: Pair, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for peer in peers:
        peer.waiting = True
    monkeypatch.setattr(Server, "stop", lambda server, politely=True: [peer._told.set() for peer in peers])
    with pytest.raises(KeyboardInterrupt), pair.threads(1) as pool:
        pool.submit(pair.request(PROMPT, 4).generate)
        raise KeyboardInterrupt
