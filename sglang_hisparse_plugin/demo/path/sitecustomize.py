"""On PYTHONPATH, so that every process of the server, spawned ones included, gets the demo's hooks and stand-ins."""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("sglang_hisparse_plugin") is None:  # run from a source tree that is not installed
    sys.path.append(str(Path(__file__).resolve().parents[3]))

if os.environ.get("SGLANG_HISPARSE_DEMO_CPU"):
    from sglang_hisparse_plugin.demo import cpu

    cpu.install()

if os.environ.get("SGLANG_HISPARSE_DEMO_PROBE"):
    from sglang_hisparse_plugin.demo import pd_probe, probe

    probe.install()
    pd_probe.install()
