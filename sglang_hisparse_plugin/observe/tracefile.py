"""The file of a trace: a line of JSON, then rows of int32, little-endian: layer, slot, generation, length, tokens.

`length` is the sequence's, the newest token included; `generation` grows when the slot changes hands. A row whose layer
is -1 says in place of the slot how many rows were lost there. A last row that was cut off is left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = "sglang-hisparse trace 1"
HEAD = 4  #: numbers of a row before its tokens
LOST = -1  #: in place of the layer

LARGEST_HOT_BUFFER = 32767  #: SGLang numbers the slots of a hot buffer in int16
_LONGEST_HEADER = 1 << 16  # bytes
_LIMITS = {"hot_buffer": LARGEST_HOT_BUFFER, "item_bytes": 1 << 20, "top_k": LARGEST_HOT_BUFFER, "model_layers": 4096}
_LONGEST_SEQUENCE = 1 << 24  # tokens; beyond any model's context


class BadTrace(ValueError):
    """The file is no trace; the text says why."""


@dataclass(frozen=True)
class Trace:
    """What was recorded, in order."""

    hot_buffer: int
    item_bytes: int
    top_k: int
    layers: tuple[int, ...]
    """Those that were recorded, of `model_layers`."""
    model_layers: int
    rows: NDArray[np.int32]
    """[rows, HEAD + top_k]"""
    lost: int = 0
    """Rows that the server selected and could not write in time."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two traces must have in common to be one load on one server."""
        return self.hot_buffer, self.item_bytes, self.top_k, self.layers, self.model_layers


def header(about: dict[str, Any]) -> bytes:
    """The first line of a file."""
    return (json.dumps({"format": MAGIC, **about}) + "\n").encode()


def gap(lost: int, top_k: int) -> bytes:
    """The row that says how many are missing."""
    return np.array([LOST, lost, 0, 0, *[-1] * top_k], dtype="<i4").tobytes()


def read(path: Path) -> Trace:
    """A file that a server has written.

    Raises:
        BadTrace: it is none, is damaged, or holds no row.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(_LONGEST_HEADER)
        about = _about(path, line)
        data = file.read()
    sizes = {name: _whole(path, name, about.get(name), 1, most) for name, most in _LIMITS.items()}
    if sizes["top_k"] > sizes["hot_buffer"]:
        raise BadTrace(f"{path} is damaged: a hot buffer of {sizes['hot_buffer']} cannot hold {sizes['top_k']} tokens")
    layers = about.get("layers")
    if not isinstance(layers, list) or not layers or len({*map(str, layers)}) != len(layers):
        raise BadTrace(f"{path} is damaged: layers is {_short(layers)}, not a list of different numbers")
    for layer in layers:
        _whole(path, "layers", layer, 0, sizes["model_layers"] - 1)
    width = HEAD + sizes["top_k"]
    rows = np.frombuffer(data, dtype="<i4", count=len(data) // (4 * width) * width).reshape(-1, width)
    gaps = rows[:, 0] == LOST
    lost, rows = rows[gaps, 1], rows[~gaps] if gaps.any() else rows
    if not len(rows):
        raise BadTrace(f"{path} holds no selection: nothing was decoded while it was recorded")
    _check_rows(path, rows, layers)
    if (lost < 1).any():
        raise BadTrace(f"{path} is damaged: it says that {lost.min()} rows were lost")
    return Trace(layers=tuple(layers), rows=rows, lost=int(lost.sum(dtype=np.int64)), **sizes)


def _about(path: Path, line: bytes) -> dict[str, Any]:
    try:
        about = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or "format" not in about:
        raise BadTrace(f"{path} is no trace of sglang-hisparse: its first line is no header, or was cut off")
    if about["format"] != MAGIC:
        raise BadTrace(f"{path} has format {_short(about['format'])}, '{MAGIC}' is known here")
    return about


def _whole(path: Path, name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise BadTrace(f"{path} is damaged: {name} is {_short(value)}, not {least} to {most}")
    return value


def _check_rows(path: Path, rows: NDArray[np.int32], layers: list[int]) -> None:
    layer, slot, generation, length = rows[:, :HEAD].T
    right = np.isin(layer, layers) & (slot >= 0) & (generation >= 0) & (length >= 1) & (length <= _LONGEST_SEQUENCE)
    if not right.all():
        at = int(np.argmin(right))
        named = ", ".join(
            f"{name} {n}" for name, n in zip(("layer", "slot", "generation", "length"), rows[at], strict=False)
        )
        raise BadTrace(f"{path} is damaged: row {at} says {named}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
