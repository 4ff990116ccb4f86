"""Who must have a whole answer: whoever fits into the pools by himself and was given up by nobody.

Whether a request fits is worked out here from its lengths and the pools' sizes, by nothing that the plugin computes:
or a plugin that refuses everybody would pass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .pools import UNITS
from .server import HOT_BUFFER, PAGE

if TYPE_CHECKING:
    from .world import World


class Served:
    """What became of each request, against what its client could expect."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: dict[str, tuple[int, int]] = {}
        """Tokens of the prompt, and of the answer, of every request that came."""
        self.room: dict[str, dict[str, int]] = {}
        """The least that each pool had for everybody, in slots, while a request was there."""
        self.given_up: set[str] = set()
        """By the client, or by the prefill worker."""
        self.pressed: set[str] = set()
        """Who was there when somebody was made to be retracted, or not everybody could be held at once."""

    def arrives(self, rid: str, prompt: int, output: int) -> None:
        self.asked[rid] = prompt, output
        self.room[rid] = self._room()
        self._look_for_pressure()
        if self.world.short:
            self.retracts()

    def tightens(self) -> None:
        """Somebody else has taken memory."""
        now = self._room()
        for rid in self._there():
            self.room[rid] = {pool: min(slots, now[pool]) for pool, slots in self.room[rid].items()}
        self._look_for_pressure()

    def retracts(self) -> None:
        """A story has somebody retracted."""
        self.pressed.update(self._there())

    def abort(self, rid: str) -> None:
        """A client gives up; SGLang takes the id for the beginning of others."""
        self.given_up.update(name for name in self._there() if name.startswith(rid))

    def judge(self) -> None:
        """When everybody has ended."""
        w = self.world
        for rid, (_, output) in self.asked.items():
            ends = w.ends(rid)
            if ends == ["length"]:
                w.expect(w.answered(rid), f"{rid} answered {list(w.requests[rid].output_ids)}")
                asked = w.requests[rid].sampling_params.max_new_tokens  # SGLang may have cut that to nothing
                w.expect(len(w.streamed(rid)) >= asked, f"the client of {rid} was streamed only {w.streamed(rid)}")
            if not ends or rid in self.given_up or not self.fits(rid) or self._excused(rid):
                continue
            why = "; ".join(reason.get("message") or reason["type"] for reason in w.reasons(rid))
            got = len(w.streamed(rid))
            w.expect(ends == ["length"], f"{rid} fits by itself, and is refused after {got} tokens: {why}")
            w.expect(ends != ["length"] or got >= output, f"{rid} fits by itself, and has {got} of {output} tokens")

    def fits(self, rid: str) -> bool:
        """Alone, with as little room as there ever was for it."""
        needs, room = self.needs(*self.asked[rid]), self.room[rid]
        return all(needs[pool] <= room[pool] for pool in UNITS)

    def needs(self, prompt: int, output: int) -> dict[str, int]:
        """Slots of each pool that a request takes at most, alone.

        SGLang asks for a page more of the logical pool, and that the pool is not full then. On the device are a prompt
        that is prefilled there, with its answer so far once it was retracted; afterwards the hot buffer, which a decode
        worker asks for as a whole.
        """
        tokens, later = _paged(prompt + output), max(output, PAGE * self._receives)
        buffer = HOT_BUFFER + PAGE if tokens >= HOT_BUFFER or self._receives else PAGE
        whole = tokens if not self._receives else prompt + later if self._whole_on_device else 0
        device = max(whole, buffer)
        return {"logical": _paged(prompt) + later + PAGE + 1, "device": device, "host": tokens}

    @property
    def _receives(self) -> bool:
        """On a decode worker, which keeps a page for each answer (`process.RESERVED`)."""
        return self.world.prefill is not None

    @property
    def _whole_on_device(self) -> bool:
        """To 0.5.10.post1 a decode worker lets nobody wait for its KV whom the device pool could not hold as well."""
        queue = importlib.import_module("sglang.srt.disaggregation.decode").DecodePreallocQueue
        asked = getattr(queue, "_allocatable_tokens", None)
        return asked is not None and "logical_attn_allocator" not in asked.__code__.co_names

    def _excused(self, rid: str) -> bool:
        """A decode worker that cannot have KV computed again tells so whom it must retract, to 0.5.21."""
        if hasattr(importlib.import_module("sglang.srt.mem_cache.common"), "dsv4_needs_rebootstrap"):
            return False
        said = [reason.get("message", "") for reason in self.world.reasons(rid)]
        return self._receives and rid in self.pressed and any("Retry later" in message for message in said)

    def _there(self) -> list[str]:
        return [rid for rid in self.asked if not self.world.ends(rid)]

    def _room(self) -> dict[str, int]:
        pools = self.world.pools
        return {pool: pools.at_rest[pool] - _slots(pool, len(pools.held[pool])) for pool in UNITS}

    def _look_for_pressure(self) -> None:
        """Of those that ended early some may still hold memory: their KV is on its way."""
        holding = [rid for rid in self.asked if self.world.ends(rid) != ["length"]]
        wanted = [self.needs(*self.asked[rid]) for rid in holding]
        room = self._room()
        if any(sum(needs[pool] for needs in wanted) > room[pool] for pool in UNITS):
            self.pressed.update(holding)


def _paged(tokens: int) -> int:
    return -(-tokens // PAGE) * PAGE


def _slots(pool: str, held: int) -> int:
    return held if pool == "host" else held * PAGE
