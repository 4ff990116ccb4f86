"""On PYTHONPATH, so that every process of the server, spawned ones included, gets the CPU stand-ins."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("sglang_hisparse_plugin") is None:  # run from a source tree that is not installed
    sys.path.append(str(Path(__file__).resolve().parents[4]))

from sglang_hisparse_plugin.demo.cpu import install

install()
