"""Speculative decoding as a user runs it: `demo --speculative` and the examples, with real servers on this CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from demo_command import WITH_HISPARSE, held

from sglang_hisparse_plugin.demo import checks, cpu, language, model, probe, releases, scales, setup, sizes
from sglang_hisparse_plugin.demo.report import Report
from sglang_hisparse_plugin.demo.server import Server, free_port
from sglang_hisparse_plugin.demo.weights import Draft

EXAMPLES = Path(__file__).parents[2] / "examples" / "speculative"
HALF = [
    "with HiSparse, drafts half wrong, sampled at a temperature of 0.01: walks are exact",
    "with HiSparse, drafts half wrong, sampled at a temperature of 0.01: pools are balanced at the end",
    "with HiSparse, drafts half wrong: some are accepted, some are not",
]


@pytest.mark.parametrize(
    ("release", "variant"),
    [
        pytest.param("0.5.10.post1", ["--no-overlap"], marks=pytest.mark.long),
        ("0.5.12", ["--draft-tokens", "4", "--no-overlap"]),  # spec v1
        ("0.5.15", ["--draft-tokens", "2"]),
    ],
)
def test_half_the_drafts_are_wrong_and_every_walk_is_exact(release: str, variant: list[str], tmp_path: Path) -> None:
    report = held("--release", release, "--speculative", "--quick", *variant, work=tmp_path)["releases"][0]
    outcomes = {check["name"]: check["passed"] for check in report["checks"]}
    names = [*(name for name in WITH_HISPARSE if name != "walks are exact without HiSparse"), *HALF]
    expected = dict.fromkeys(names, True) | {"the plugin's swap-in kernel did the work": None}
    assert outcomes == expected


@pytest.mark.long
@pytest.mark.parametrize("draft_tokens", map(int, os.environ.get("OWN_DRAFT_TOKENS", "2").split(",")))
def test_sglangs_own_way_from_0_5_22_on(draft_tokens: int, tmp_path: Path) -> None:
    """Half the drafts wrong, on the real server of 0.5.23, which wants a top-k of 1024.

    With 2 or 3 draft tokens the plugin's op answers, with 4 a stand-in that does what SGLang's kernel does. The walk
    needs rows that the buffer has not, and breaks where one of them is wrong.
    """
    dims = replace(sizes.CPU, index_topk=1024)
    length = 1024 * draft_tokens + 552
    prompt = {"long": (length,), "crowd": (length, length), "steps": 48, "slots": 2}
    scale = replace(scales.CPU, dims=dims, hot_buffer=2048, device_tokens=12288, **prompt).verifying(draft_tokens)
    weights = model.folder(tmp_path / "model", Draft.HALF)
    model.write(weights, dims, Draft.HALF)
    target = setup.Target("0.5.23", releases.fetch("0.5.23"))
    launcher = setup.Launcher(
        target, scale, tmp_path / "model", tmp_path, print, setup.Variant(draft_tokens=draft_tokens)
    )
    report = Report("0.5.23")
    with launcher.server("own", draft=Draft.HALF) as server:
        tokens = language.prompt(length, seed=1)
        answer = server.generate(tokens, scale.steps)
        assert answer.tokens == language.walk(tokens, scale.steps)
        assert 1.2 < (scale.steps - 1) / answer.verifications < draft_tokens - 0.2
        checks.one_wrong_row(launcher, report, server, layer=0)
        checks.pools_balance(report, server)
        swapped = server.internal_state()[probe.KEY]["swap_in"]
    assert [check.passed for check in report.checks] == [True, True], report.checks
    assert (swapped["misses"] > 0) == (draft_tokens < 4)  # the plugin's op counts, the stand-in does not


def example(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_serve_and_client(tmp_path: Path) -> None:
    """`serve.sh both`, with the flags that a CPU needs behind the model, and `client.py` twice on it."""
    root = releases.fetch("0.5.12")
    weights = model.write(tmp_path / "model", sizes.CPU)
    launcher = setup.Launcher(setup.Target("0.5.12", root), scales.CPU, weights, tmp_path, print)
    flags = launcher._command(hisparse=False)[4:]
    env = cpu.environment(root) | {"PYTHON": sys.executable, "TOP_K": str(sizes.CPU.index_topk)}
    command = ["bash", str(EXAMPLES / "serve.sh"), "both", str(weights), *flags]
    with Server(command, env, tmp_path / "log", patience=240, progress=lambda text: None) as server:
        load = ["--concurrency", "1", "--context", "300", "--steps", "60", "--rows", "rows.json"]
        url = f"http://127.0.0.1:{server.port}"
        example("client.py", f"first={url}", *load, cwd=tmp_path)
        shown = example("client.py", f"second={url}", *load, cwd=tmp_path)
        assert server.alive
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["mode"] for row in rows] == ["first", "second"]
    assert all(name in shown for name in ("first", "second"))
    for row in rows:
        assert 1 <= row["acceptance"] <= 3
        assert 0 < row["hit_rate"] <= 1


@pytest.mark.long
def test_table(tmp_path: Path) -> None:
    """One row for each mode, and every token of it right."""
    load = ["--modes", "speculative", "both", "--kernels", "ours", "--concurrency", "2", "--steps", "80"]
    load += ["--repeats", "2", "--starts", "1"]
    example("table.py", "--device", "cpu", *load, "--json", "rows.json", cwd=tmp_path)
    record = json.loads((tmp_path / "rows.json").read_text())
    assert record["failures"] == []
    assert [(row["mode"], row["kernel"]) for row in record["rows"]] == [("speculative", None), ("both", "ours")]
    fields = {"release", "mode", "kernel", "concurrency", "context", "tokens_per_s", "ms_per_token", "ms_per_step"}
    fields |= {"hit_rate", "acceptance", "device", "commit", "samples", "tokens_per_s_spread", "ms_per_step_spread"}
    assert set(record["rows"][1]) == fields
    for row in record["rows"]:
        assert row["samples"] == 2 and row["tokens_per_s_spread"][0] <= row["tokens_per_s"]
        assert row["ms_per_step"] == pytest.approx(row["ms_per_token"] * row["acceptance"])
    (cost,) = record["costs"]
    assert (cost["mode"], cost["without"]) == ("both", record["rows"][0]["ms_per_step"])
    assert all(row["acceptance"] > 2.7 for row in record["rows"])
    assert record["rows"][0]["hit_rate"] is None
    assert record["rows"][1]["hit_rate"] > 0


FAKE = """#!{python}
import http.server, json, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for n in range(1, asked["sampling_params"]["max_new_tokens"] + 1):
            piece = {{"output_ids": [7] * n, "meta_info": {{"completion_tokens": n}}}}
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
            time.sleep(0.0005)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.mark.parametrize("refuses", [False, True])
def test_the_loop_of_the_readme(tmp_path: Path, refuses: bool) -> None:
    """As written but for the port; instead of SGLang a server that answers like one, or one that refuses to start."""
    shutil.copytree(EXAMPLES, tmp_path / "examples" / "speculative")
    loop = next(part for part in (EXAMPLES / "README.md").read_text().split("```\n") if part.startswith("cd examples"))
    port = str(free_port())
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\nexit 1\n" if refuses else FAKE.format(python=sys.executable))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in (fake, python):
        program.chmod(0o755)
    env = os.environ | {"PYTHON": str(fake), "MODEL": "model", "PORT": port}
    env["PATH"] = f"{tmp_path / 'bin'}:{env['PATH']}"
    script = loop.replace("30000", port) + "echo the shell goes on\n"
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True, env=env, cwd=tmp_path)
    rows = tmp_path / "examples" / "speculative" / "rows.json"
    assert "the shell goes on" in done.stdout, done.stderr
    if refuses:
        assert not rows.exists()
        return
    modes = ["plain", "hisparse", "speculative", "both"]
    measured = [(row["mode"], row["concurrency"]) for row in json.loads(rows.read_text())]
    assert measured == [(mode, requests) for mode in modes for requests in (1, 4)], done.stderr


def test_serve_says_how_it_is_used() -> None:
    done = subprocess.run(
        ["bash", EXAMPLES / "serve.sh", "neither", "model"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "plain|hisparse|speculative|both" in done.stderr


def test_a_client_without_a_server_says_so(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "client.py", "plain=http://127.0.0.1:9"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 1
    assert "plain: " in done.stderr
    assert "Traceback" not in done.stderr
