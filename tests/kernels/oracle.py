"""The swap-in, slow and obvious: one request at a time, one entry at a time, on Python lists and bytearrays.

It shares nothing with the package. `device` and `host` are lists of rows (bytearray / bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Tables:
    """One request's state."""

    tokens: list[int]  # token in each buffer slot
    lru: list[int]  # slots, next to be evicted first
    locs: list[int]  # device row of each buffer slot, those of the extra page too
    host_locs: list[int]  # host row of each token


@dataclass
class Answer:
    locs: list[int]
    copies: list[tuple[int, int]] = field(default_factory=list)  # (host row, device row), in the order of the plan
    hits: int = 0


def swap_in(tables: Tables, top_k: list[int], seq_len: int, hot: int, tail_start: int | None = None) -> Answer:
    """Answer one request and update its tables in place."""
    tail = seq_len if tail_start is None else tail_start
    answer = Answer(locs=[])

    misses: dict[int, None] = {}  # in the order of the top-k, each token once
    used: set[int] = set()  # slots hit
    holds = _holds(tables, hot)
    for token in top_k:
        looked_up = 0 <= token < seq_len and token < tail and seq_len > hot and token != seq_len - 1
        if looked_up and token in holds:
            used.add(holds[token])
        elif looked_up:
            misses[token] = None

    evictable = [slot for slot in tables.lru if slot not in used]
    victims = evictable[: len(misses)]
    tables.lru[:] = evictable[len(misses) :] + victims + [slot for slot in tables.lru if slot in used]
    for token, slot in zip(misses, victims, strict=True):
        tables.tokens[slot] = token
        answer.copies.append((tables.host_locs[token], tables.locs[slot]))

    holds = _holds(tables, hot)
    for token in top_k:
        if token < 0 or token >= seq_len:
            slot = None
        elif token >= tail:
            slot = hot + 1 + token - tail
        elif seq_len <= hot:
            slot = token
        elif token == seq_len - 1:
            slot = hot
        else:
            slot = holds[token]
        nowhere = slot is None or slot >= len(tables.locs)
        answer.locs.append(-1 if nowhere else tables.locs[slot])
    answer.hits = sum(loc != -1 for loc in answer.locs) - len(misses)
    return answer


def copy(copies: list[tuple[int, int]], host: list[bytes], device: list[bytearray], size: int) -> None:
    """Copy `size` bytes of each row of the plan."""
    for src, dst in copies:
        device[dst][:size] = host[src][:size]


def _holds(tables: Tables, hot: int) -> dict[int, int]:
    """Which slot of the hot buffer holds which token."""
    return {token: slot for slot, token in enumerate(tables.tokens[:hot])}
