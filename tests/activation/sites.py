"""Sites (bare virtual environments) with the plugin installed as users install it, and servers started in them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_hisparse_plugin.demo import cpu

CHECKOUT = Path(__file__).parents[2]
RELEASES = ("0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.23")
CONFIG = """{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 256,
"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64, "intermediate_size": 256, "kv_lora_rank": 512,
"max_position_embeddings": 4096, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1,
"num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_key_value_heads": 4,
"q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 512,
"first_k_dense_replace": 1, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}"""
STARTED = re.compile(r"HiSparse plugin \S+ on SGLang .*mode \w+:|max_total_num_tokens=|Load weight begin")


@dataclass(frozen=True)
class Site:
    """A virtual environment of its own that sees the test environment's packages, but none of its ``.pth`` files."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def packages(self) -> Path:
        return self.root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def run(
        self, *argv: str, sglang: Path | None = None, env: Mapping[str, str] | None = None, timeout: int = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *argv`` to its end; stdout and stderr are both in ``stdout``."""
        return subprocess.run(
            [str(self.python), *argv],
            env=self.environment(sglang, env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            cwd=self.root,
            check=False,
        )

    def environment(self, sglang: Path | None, extra: Mapping[str, str] | None) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTHON"))}
        env = cpu.environment(sglang, base) if sglang else {**base, "PYTHONDONTWRITEBYTECODE": "1"}
        return {**env, **(extra or {})}


def make_site(root: Path) -> Site:
    """An empty site."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    site = Site(root)
    paths = {sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("site-packages"))}
    (site.packages / "zz_test_environment.pth").write_text("\n".join(sorted(paths)) + "\n")
    return site


def install(site: Site, *what: str) -> None:
    """``pip install`` into a site, without dependencies."""
    argv = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(site.python),
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*argv, "--disable-pip-version-check", *what], check=True)


def server_arguments(model: Path, *extra: str) -> list[str]:
    """``python`` arguments of the unmodified launcher."""
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy", "--device", "cpu"),
        *("--skip-tokenizer-init", "--disable-radix-cache", "--enable-hisparse", "--attention-backend", "nsa"),
        *("--kv-cache-dtype", "bfloat16"),
        *("--mem-fraction-static", "0.1", "--port", str(20000 + os.getpid() % 20000), *extra),
    ]


@contextmanager
def started(site: Site, sglang: Path, argv: list[str], env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The log of a launcher up to the plugin's report, or to its end; everything is stopped then."""
    log = site.root / f"server-{os.getpid()}-{time.monotonic_ns()}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(site.python), *argv],
            env=site.environment(sglang, env),
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=site.root,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 150
        while process.poll() is None and not STARTED.search(log.read_text()):
            if time.monotonic() > deadline:
                pytest.fail("the launcher printed no report in 150 s:\n" + log.read_text()[-3000:])
            time.sleep(0.2)
        time.sleep(0.5)
        yield log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
