"""Results of ``sglang-hisparse bench`` as one HTML page, pictures and JSON."""

from __future__ import annotations

from .data import Bench, Engine, ReportError, read_bench, read_engine
from .write import write

__all__ = ["Bench", "Engine", "ReportError", "read_bench", "read_engine", "write"]
