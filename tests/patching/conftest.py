"""A host package made for each test, so that engine tests know nothing of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hisparse_plugin.patching.source import SourceTree

HOST = """
class Machine:
    def __init__(self):
        self.log = []

    def start(self, speed):
        self.log.append(speed)
        return speed

    @classmethod
    def build(cls, name):
        return cls, name

    @staticmethod
    def unit():
        return "m/s"


def brake(force):
    return force
"""
USER = "from host_under_test.machine import brake\n\n\ndef stop():\n    return brake(3)\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceTree]:
    package = tmp_path / "host_under_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "machine.py").write_text(HOST)
    (package / "user.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield SourceTree(tmp_path)
    for name in [n for n in sys.modules if n.startswith("host_under_test")]:
        del sys.modules[name]
