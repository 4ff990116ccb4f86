"""What carries KV from a prefill server to a decode server: Mooncake over TCP where it runs, else nothing does."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from .setup import Launcher

LOOPBACK = "127.0.0.1"
#: What makes Mooncake use TCP, and both servers call themselves by the loopback address.
ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_BIND_ADDRESS": LOOPBACK,
    "SGLANG_HOST_IP": LOOPBACK,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",  # seconds; two without an answer, and a prefill server is lost
}
REMEDY = (
    "Install mooncake-transfer-engine (mooncake-transfer-engine-cuda13 for CUDA 13, mooncake-transfer-engine-non-cuda "
    "without a GPU) beside SGLang, and the system's libibverbs1, which it is linked to"
)
_SENDS_TO_ITSELF = """
import ctypes, importlib.metadata as metadata
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0, "the engine does not start"
rows = ctypes.create_string_buffer(b"known" + bytes(59), 64)
start = ctypes.addressof(rows)
assert engine.batch_register_memory([start], [64]) == 0, "no memory can be registered"
peer = f"127.0.0.1:{engine.get_rpc_port()}"
assert engine.batch_transfer_sync_write(peer, [start], [start + 32], [5]) == 0, "a transfer fails"
assert rows.raw[32:37] == b"known", "a transfer brings something else"
print(*(f"{name} {metadata.version(name)}" for name in metadata.packages_distributions()["mooncake"]))
"""


@dataclass(frozen=True)
class Transport:
    """What carries KV between the servers."""

    backend: str
    """--disaggregation-transfer-backend."""
    carries: bool
    detail: str
    """Which one, or why it is none that carries anything."""


def find(launcher: Launcher) -> Transport:
    """Mooncake over TCP, if it is installed and brings a few bytes from here to here; else SGLang's `fake`."""
    environment = launcher.server("transport").env | ENVIRONMENT
    command = [sys.executable, "-c", _SENDS_TO_ITSELF]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
    if done.returncode == 0:
        return Transport("mooncake", True, said[-1])
    return Transport("fake", False, f"{said[-1]}. {REMEDY}")
