"""``--hisparse-config``, with SGLang's defaults (sparsity/factory.py, _parse_sparse_config). Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .amounts import round_up
from .error import SizingError

MAX_DEVICE_BUFFER = 32768  # slots are int16
MOST = 1 << 24  # beyond this a value is a mistake
KEYS = ("top_k", "device_buffer_size", "host_to_device_ratio", "swap_in_block_size")
#: Parsed by SGLang, and not used by HiSparse.
IGNORED = ("algorithm", "backend", "min_sparse_prompt_len", "page_size")
QUOTE = "write it in single quotes: --hisparse-config '{\"device_buffer_size\": 4096}'"


def parse(text: str | None) -> dict[str, Any]:
    """The flag's value as an object; None means the flag is not given.

    Raises:
        SizingError: it is no JSON object.
    """
    try:
        config = {} if text is None else json.loads(text)
    except RecursionError:
        raise SizingError("--hisparse-config is no JSON: it is nested too deeply") from None
    except ValueError as error:
        place = f" (from character {error.pos + 1} on)" if isinstance(error, json.JSONDecodeError) else ""
        raise SizingError(f"--hisparse-config is no JSON{place}: {text!s:.200}") from None
    if not isinstance(config, dict):
        raise SizingError(f"--hisparse-config is no JSON object: {text!s:.200}")
    return config


def faults(config: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with single values, and the remedy; SGLang fails on them later, or takes them for others."""
    return {
        f"{key} in --hisparse-config is {json.dumps(config[key])[:40]}: a whole number from 1 on is needed": (
            f"for {key} give {_near(config[key])}"
        )
        for key in KEYS
        if key in config and (type(config[key]) is not int or not 1 <= config[key] <= MOST)
    }


def _near(value: Any) -> str:
    """Whole numbers that may have been meant."""
    if isinstance(value, str) and value.isdecimal() and 1 <= int(value[:20]) <= MOST:
        return f"{int(value)}, without quotes"
    if isinstance(value, float) and 1 <= value <= MOST:
        return " or ".join(str(whole) for whole in sorted({math.floor(value), math.ceil(value)}))
    return f"a whole number from 1 to {MOST}"


def unknown(config: Mapping[str, Any]) -> list[str]:
    """Keys that SGLang takes no notice of."""
    return [key for key in config if key not in KEYS + IGNORED]


@dataclass(frozen=True)
class HiSparse:
    """The values that sizes follow from."""

    top_k: int = 2048
    device_buffer_size: int = 4096
    host_to_device_ratio: int = 2
    page_size: int = 64
    others: Mapping[str, Any] = field(default_factory=dict)
    """What else was given, for the flag to be written again."""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise SizingError(f"top_k is {self.top_k}: give the model's index_topk")
        if self.device_buffer_size < self.top_k:
            raise SizingError(
                f"device_buffer_size {self.device_buffer_size} is less than top_k {self.top_k}: one step may select "
                f"that many tokens. Give at least {round_up(self.top_k, self.page_size)}; {2 * self.top_k} is the "
                "default"
            )
        if self.device_buffer_size > MAX_DEVICE_BUFFER:
            raise SizingError(
                f"device_buffer_size {self.device_buffer_size} is more than int16 can count: {MAX_DEVICE_BUFFER}"
            )
        if self.device_buffer_size % self.page_size:
            raise SizingError(
                f"device_buffer_size {self.device_buffer_size} is no multiple of the page size {self.page_size}: "
                f"give {round_up(self.device_buffer_size, self.page_size)}"
            )
        if self.host_to_device_ratio < 1:
            raise SizingError(f"host_to_device_ratio is {self.host_to_device_ratio}: give a whole number from 1 on")

    @property
    def padded_buffer(self) -> int:
        """Device slots of one decoding request: the hot buffer and a page for the newest tokens."""
        return self.device_buffer_size + self.page_size

    @classmethod
    def from_json(cls, text: str | None, index_topk: int = 2048) -> HiSparse:
        """From the flag's value.

        Raises:
            SizingError: it is no JSON object, a value is no whole number, or they do not fit each other.
        """
        config = parse(text)
        if wrong := faults(config):
            raise SizingError("; ".join(f"{what}; {remedy}" for what, remedy in wrong.items()))
        top_k = config.get("top_k", index_topk)
        return cls(
            top_k=top_k,
            device_buffer_size=config.get("device_buffer_size", 2 * top_k),
            host_to_device_ratio=config.get("host_to_device_ratio", 2),
            others={key: value for key, value in config.items() if key not in KEYS[:3]},
        )

    def to_json(self) -> str:
        """The flag's value; SGLang's default for top_k is left out."""
        config = {"top_k": self.top_k} if self.top_k != HiSparse.top_k else {}
        config["device_buffer_size"] = self.device_buffer_size
        config["host_to_device_ratio"] = self.host_to_device_ratio
        return json.dumps({**config, **self.others}, separators=(",", ":"))
