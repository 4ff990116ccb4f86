"""A real scheduler decodes as many requests at once as a plan says, and no more; with the plugin's rule no fewer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from lifecycle import launch
from lifecycle import server as lifecycle

from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.sizing import given, plan
from sglang_hisparse_plugin.sizing.shapes import HiSparse, ModelShape

PROMPT, OUTPUT, PLANNED, SUBMITTED = 500, 60, 10, 14


def crowd(release: str, fewer_slots: int = 0, skip: str = "") -> dict[str, int]:
    """What `crowd` saw with a plan for PLANNED requests, or with some device slots less, or without an overlay."""
    work = given.Workload(
        release, ModelShape.from_config(lifecycle.MODEL), HiSparse(64, 128), "bfloat16", PROMPT, OUTPUT
    )
    planned = plan.smallest(work, PLANNED)
    config = {
        "top_k": 64,
        "device_buffer_size": 128,
        "host_to_device_ratio": planned.hisparse.host_to_device_ratio,
    }
    flags = [
        f"--max-total-tokens={planned.device_tokens - fewer_slots}",
        f"--max-running-requests={PLANNED + 2}",
        f"--hisparse-config={json.dumps(config)}",
        f"--context-length={planned.context}",
    ]
    sglang = releases.fetch(release)
    env = launch.environment(sglang, "strict", SGLANG_HISPARSE_PLUGIN_SKIP=skip)
    command = [sys.executable, "-m", "sizing.crowd", str(PROMPT), str(OUTPUT), str(SUBMITTED), *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


#: Left out, SGLang's own rule admits, which holds back slots for tokens to come.
SGLANGS_OWN = "admission-memory,length-limit"


@pytest.mark.parametrize("release", ["0.5.10.post1", "0.5.23"])
def test_as_many_decode_at_once_as_planned(release: str) -> None:
    assert crowd(release, skip=SGLANGS_OWN) == {"most": PLANNED, "retracted": 0, "answered": SUBMITTED}


def test_where_the_plugin_admits_no_fewer_do() -> None:
    found = crowd("0.5.23")
    assert found["most"] >= PLANNED and found | {"most": 0} == {"most": 0, "retracted": 0, "answered": SUBMITTED}


def test_control_with_fewer_slots_fewer_decode() -> None:
    assert crowd("0.5.23", fewer_slots=256, skip=SGLANGS_OWN)["most"] == PLANNED - 1
