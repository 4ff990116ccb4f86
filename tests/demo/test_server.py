"""Starting and stopping a server, with small scripts in place of SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import server as module
from sglang_hisparse_plugin.demo.server import Answer, Server, ServerFailed

# A server with a child that ignores SIGTERM, as a scheduler busy in a kernel would.
SERVES = """
import http.server, json, signal, subprocess, sys
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"internal_states": [{"a": 1}]}).encode())
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        steps = body["sampling_params"]["max_new_tokens"]
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps({"output_ids": body["input_ids"][:steps]}).encode())
    def log_message(self, *args): pass
port = int(next(a for a in sys.argv if a.startswith("--port=")).split("=")[1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DIES = "print('the reason', flush=True); raise SystemExit(3)"
# Answers half of what it announces, then ends with an error, as a server whose scheduler died.
BREAKS = SERVES.replace(
    "        steps =",
    """
        self.send_response(200); self.send_header("Content-Length", "100"); self.end_headers()
        self.wfile.write(b"{"); self.wfile.flush()
        print("Traceback\\nRuntimeError: no slots, \\n", flush=True)
        import os; child.kill(); os._exit(1)
        steps =""",
)
HANGS = "import time; print('loading', flush=True); time.sleep(600)"


def server(script: str, log: Path, patience: float = 30) -> Server:
    return Server([sys.executable, "-c", script], dict(os.environ), log, patience, lambda text: None)


def gone(pid: int) -> bool:
    """The process has ended; a zombie that nobody has reaped yet counts."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def child_of(running: Server) -> int:
    return int(running.log_text().split()[1])


def test_it_answers_and_everything_it_started_is_stopped(tmp_path: Path) -> None:
    with server(SERVES, tmp_path / "log") as running:
        assert running.alive
        assert running.generate([5, 6, 7], 2) == Answer([5, 6], verifications=0)
        assert running.internal_state() == {"a": 1}
        child = child_of(running)
    assert not running.alive
    assert gone(child), "a child that ignores SIGTERM is killed"
    with pytest.raises(OSError):
        running.generate([1], 1)


def test_it_is_stopped_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), server(SERVES, tmp_path / "log") as running:
        child = child_of(running)
        raise KeyError
    assert gone(child)


def test_a_server_that_ends_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    with server(BREAKS, tmp_path / "log") as running:
        assert not running.ended()
        with pytest.raises(OSError, match="half an answer"):
            running.generate([1], 1)
        assert running.ended(within=30)
        assert running.last_exception() == "RuntimeError: no slots"


def test_a_server_that_dies_while_starting_is_quoted(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerFailed, match=r"(?s)ended while starting.*the reason.*log: .*/log"),
        server(DIES, tmp_path / "log"),
    ):
        pass


def test_a_server_that_never_is_ready_is_stopped(tmp_path: Path) -> None:
    hanging = server(HANGS, tmp_path / "log", patience=1.5)
    with pytest.raises(ServerFailed, match=r"(?s)not ready after \d+ s.*loading"), hanging:
        pass
    assert not hanging.alive


def test_interruption_stops_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    script = f"""
import signal, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_server import SERVES, server
from sglang_hisparse_plugin.demo.server import ServerFailed, stop_all
running = server(SERVES, Path({str(tmp_path / "log")!r})).__enter__()
stop_all()
try:
    server(SERVES, Path({str(tmp_path / "other")!r})).__enter__()
except ServerFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "interrupted"
    assert gone(int((tmp_path / "log").read_text().split()[1]))
    assert not (tmp_path / "other").exists()


def test_ports_leave_room_for_those_sglang_derives() -> None:
    assert all(20000 <= module.free_port() < 50000 for _ in range(20))
