"""The file of a trace: a line of JSON, then rows of int32, little-endian: layer, slot, generation, length, tokens.

`length` is the sequence's, the newest token included; `generation` grows when the slot changes hands. A row that was
cut off is left out.
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
REQUEST = "record"  #: the file that asks a server for a trace


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


def header(about: dict[str, Any]) -> bytes:
    """The first line of a file."""
    return (json.dumps({"format": MAGIC, **about}) + "\n").encode()


def read(path: Path) -> Trace:
    """A file that a server has written.

    Raises:
        BadTrace: it is none, or holds no row.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line, data = file.readline(1 << 16), file.read()
    try:
        about = json.loads(line)
        if about["format"] != MAGIC:
            raise BadTrace(f"{path} has format '{about['format']}', '{MAGIC}' is known here")
        sizes = [int(about[name]) for name in ("hot_buffer", "item_bytes", "top_k", "model_layers")]
        layers = tuple(int(layer) for layer in about["layers"])
    except BadTrace:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BadTrace(f"{path} is no trace of sglang-hisparse: {error}") from error
    width = HEAD + sizes[2]
    rows = np.frombuffer(data[: len(data) // (4 * width) * 4 * width], dtype="<i4").reshape(-1, width)
    if not len(rows):
        raise BadTrace(f"{path} holds no selection: nothing was decoded while it was recorded")
    return Trace(sizes[0], sizes[1], sizes[2], layers, sizes[3], rows)
