"""Prompts whose right continuation is known: a dictionary computes it (`walk`), never a model.

A prompt is a shuffled list of *edges*, most of them distractors. The last edge names the key to look up first. At each
step the one edge with that key, anywhere in the context, is repeated; the edge's value is the next key. After one lap
around the cycle keys are looked up in what was generated, not in the prompt. So every step depends on one particular
row of the KV cache: one that is lost, stale or in the wrong place gives another token.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STAGES, WIDTH = 64, 4  #: a cycle visits STAGES stages, one of WIDTH keys in each; a choice at a key picks the next one
KEYS = STAGES * WIDTH
CONTENTS = KEYS * WIDTH  #: (key, choice)
BASE = 32  #: the two digits of a content
PROMPT, FIRST_LAP, LATER_LAP = range(3)  #: who wrote a token; each lap looks its keys up in the one before
TAGS = 3
HOME = 0  #: the key every cycle passes and where a lap ends
RESERVED = 64  #: ids below are no edges (begin and end of sequence, padding)
VOCABULARY = RESERVED + TAGS * CONTENTS

assert BASE * BASE == CONTENTS


@dataclass(frozen=True)
class Edge:
    """A token: `key` and a `choice` of the next key, written by `tag`."""

    tag: int
    key: int
    choice: int

    @property
    def token(self) -> int:
        return RESERVED + (self.tag * KEYS + self.key) * WIDTH + self.choice

    @classmethod
    def of(cls, token: int) -> Edge:
        rest, choice = divmod(token - RESERVED, WIDTH)
        return cls(*divmod(rest, KEYS), choice)

    @property
    def content(self) -> int:
        return self.key * WIDTH + self.choice

    @property
    def address(self) -> int:
        """What a look-up finds this edge by."""
        return self.tag * KEYS + self.key

    @property
    def value(self) -> int:
        return (self.key // WIDTH + 1) % STAGES * WIDTH + self.choice

    @property
    def next_tag(self) -> int:
        return FIRST_LAP if self.tag == PROMPT else min(LATER_LAP, self.tag + (self.value == HOME))

    @property
    def wanted(self) -> int:
        """The address to look up next."""
        return (self.next_tag - 1) * KEYS + self.value


def prompt(length: int, seed: int) -> list[int]:
    """Token ids of a prompt with one random cycle, its edges in random places among distractors.

    Args:
        length: tokens, at least STAGES + 1.
    """
    rng = random.Random(seed)
    members = [HOME % WIDTH] + [rng.randrange(WIDTH) for _ in range(STAGES - 1)]
    cycle = [Edge(PROMPT, s * WIDTH + members[s], members[(s + 1) % STAGES]) for s in range(STAGES)]
    on_cycle = {edge.key for edge in cycle}
    off_cycle = [key for key in range(KEYS) if key not in on_cycle]
    fill = length - 1 - STAGES
    if fill < 0:
        raise ValueError(f"a prompt has at least {STAGES + 1} tokens, not {length}")
    edges = cycle + [Edge(PROMPT, rng.choice(off_cycle), rng.randrange(WIDTH)) for _ in range(fill)]
    rng.shuffle(edges)
    last = next(key for key in off_cycle if key // WIDTH == STAGES - 1)
    return [edge.token for edge in [*edges, Edge(PROMPT, last, HOME)]]


def walk(tokens: list[int], steps: int) -> list[int]:
    """The `steps` tokens that rightly follow a prompt, by dictionary look-up."""
    edges = [Edge.of(token) for token in tokens]
    written = {edge.address: edge for edge in edges}
    current, answer = edges[-1], []
    for _ in range(steps):
        found = written[current.wanted]
        current = Edge(current.next_tag, found.key, found.choice)
        written[current.address] = current
        answer.append(current.token)
    return answer


def needed_position(tokens: list[int], step: int) -> int:
    """The position (in prompt and answer) of the one row that step `step` (from 0) must read."""
    history = tokens + walk(tokens, step)
    wanted = Edge.of(history[-1]).wanted
    return max(i for i, token in enumerate(history) if Edge.of(token).address == wanted)
