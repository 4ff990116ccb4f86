"""A story in lines of text, one event each, that a world plays: what the state machine writes and regressions keep.

pools logical=8 device=6 host=384 slots=2
arrive r0 prompt=110 output=24
run 3
abort r0
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

from sglang_hisparse_plugin.admission import Admission

from .logprobs import Wanted
from .pools import UNITS, slot_of
from .served import Served
from .server import PAGE
from .world import World

AFTERMATH = 2
"""Tokens that may still come after an abort: the step under way, and with overlap one more."""
PATIENCE = 40
"""Iterations more than there are tokens to generate in which everything must have ended once nothing holds it up."""


class Story:
    """Plays lines on a fresh world; each line returns the evidence of what went wrong in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.arrived: list[str] = []
        self.tokens = 0
        self.aborted: dict[str, int] = {}
        """Tokens that each request had when the client gave it up."""
        self.wanted: dict[str, Wanted] = {}
        """The logprobs that requests ask for; the others want none."""
        self.told = 0
        self.holding = False
        self.served = Served(world)

    def play(self, line: str) -> list[str]:
        name, *words = line.split()
        named = dict(word.split("=") for word in words if "=" in word)
        values = [_value(word) for word in words if "=" not in word]
        try:
            getattr(self, f"do_{name}")(*values, **{key: _value(value) for key, value in named.items()})
        except Exception as error:  # SGLang's, which would have ended the server
            if self.world.error is None:
                raise
            return [*self._news(), crash(error)]
        return self._news()

    # --- events ---

    def do_again(self) -> None:
        """The last sequence ended at rest, and the server goes on."""

    def do_pools(self, **sizes: int) -> None:
        self.world.pools.resize(**sizes)

    def do_priorities(self) -> None:
        self.world.prefer_priority()

    def do_arrive(
        self,
        rid: str,
        *,
        prompt: int,
        output: int,
        priority: int | None = None,
        ignore_eos: int = 1,
        top: int | None = None,
        named: int = 0,
    ) -> None:
        """With `top` it wants logprobs, and of so many best tokens; if `named`, of some that it names, too."""
        self.arrived.append(rid)
        if top is not None:
            self.wanted[rid] = Wanted(top, [5, 17] if named else None)
        asked = self.wanted[rid].fields if top is not None else {}
        self.tokens += output
        self.served.arrives(rid, prompt, output)
        self.world.arrive(rid, prompt, output, priority, ignore_eos=bool(ignore_eos), **asked)
        self.do_run(1)

    def do_run(self, turns: int) -> None:
        for _ in range(turns):
            if self.holding:
                self.world.hold_staging()
            self.world.run(1)
        self._judge()

    def do_abort(self, rid: str) -> None:
        req = self.world.requests.get(rid)
        if req is not None and not self.world.ends(rid):
            self.aborted.setdefault(rid, len(req.output_ids))
        self.served.abort(rid)
        self.world.abort(rid)
        self._judge()

    def do_hold(self) -> None:
        """No staging transfer ends from now on."""
        self.holding = True
        self.world.hold_staging()

    def do_release(self, oldest: int | None = None) -> None:
        self.holding = False
        self.world.release_staging(oldest)

    def do_squeeze(self, pool: str, keep: int) -> None:
        """Somebody else takes memory."""
        self.world.pools.hold_memory(pool, keep)
        self.served.tightens()

    def do_relax(self) -> None:
        self.world.pools.release_memory()

    def do_retract(self) -> None:
        self.served.retracts()
        self.world.run_short()
        self.do_run(1)

    def do_pause(self, mode: str) -> None:
        if mode == "retract":
            self.served.retracts()
        self.world.pause(mode)
        self._judge()

    def do_resume(self) -> None:
        self.world.resume()
        self._judge()

    def do_flush(self) -> None:
        self.world.flush()
        self._judge()

    def do_part(self, rid: str) -> None:
        """Some rows of a request's prompt arrive."""
        self._transfers("part", rid)

    def do_land(self, rid: str = "") -> None:
        """All rows of a request's prompt have arrived, and its first token; of every request, if none is named."""
        self._transfers("land", rid)

    def do_fail(self, rid: str) -> None:
        """The prefill worker gives a request up."""
        self._transfers("fail", rid)

    def _transfers(self, how: str, rid: str = "") -> None:
        for transfer in self.world.prefill.under_way(rid):
            if how == "fail":
                self.served.given_up.add(transfer.rid)
            if how == "fail" or transfer.sending:
                getattr(transfer, how)()
        self.do_run(1)

    def do_wait(self, seconds: int) -> None:
        """Time passes, for whoever waits for a prefill worker."""
        self.world.prefill.clock.ahead += seconds
        self.do_run(1)

    def do_busy(self) -> None:
        """From now on the prefill worker answers requests later than it sends their KV."""
        self.world.prefill.busy = True

    def do_catch_up(self) -> None:
        """It answers all that it has sent."""
        self.world.prefill.catch_up()

    def do_answered(self, rid: str) -> None:
        """By now a request has ended."""
        self.world.expect(bool(self.world.ends(rid)), f"{rid} is not answered yet")

    def do_plant(self, bug: str) -> None:
        """A bug of our own, for whoever has something on the host; nobody, nothing."""
        for req in self.world.requests.values():
            slot = slot_of(req)
            if self.world.prefill and self.world.prefill.under_way(req.rid):  # which would write the row anew
                continue
            if slot is not None and self.world.coordinator.req_to_host_pool[slot, 0] >= 0:
                PLANTED[bug](self.world, req.rid, slot)
                self.do_run(1)
                return

    def do_end(self) -> None:
        """Nothing holds anything up any more; everybody must end, once, and nothing may be left."""
        w = self.world
        self.do_release()
        self.do_relax()
        w.resume()
        for _ in range(PATIENCE + self.tokens):
            if w.prefill:
                self._transfers("land")
                w.prefill.clock.ahead += 2  # for whoever waits for a prefill worker that gave up
            if all(map(w.ends, self.arrived)):
                break
            w.run(1)
        w.run(3)
        self._judge()
        stuck = [rid for rid in self.arrived if not w.ends(rid)]
        too_long = {rid: why for rid in stuck if (why := self._too_long(rid))}
        for rid in too_long or stuck:  # behind one that is never scheduled all others may have to wait
            w.expect(False, f"{rid} never ends{too_long.get(rid, '')}")
        self.served.judge()
        for rid in self.arrived:
            if w.ends(rid) == ["length"]:
                for wrong in w.logprobs(rid).wrong(self.wanted.get(rid), list(w.requests[rid].output_ids)):
                    w.expect(False, f"{rid}: {wrong}")
        w.expect_at_rest()

    # --- judging ---

    def _judge(self) -> None:
        w = self.world
        for rid in self.arrived:
            ends = w.ends(rid)
            w.expect(len(ends) <= 1, f"{rid} ended more than once: {ends}")
            if rid not in w.requests:
                continue
            tokens, first = w.streamed(rid), w.first_token(rid)
            right = tokens == list(range(first, first + len(tokens)))
            w.expect(right, f"the client of {rid} was streamed {tokens}")
            if rid in self.aborted:
                more = len(w.requests[rid].output_ids) - self.aborted[rid]
                w.expect(more <= AFTERMATH, f"{rid} goes on after its abort")

    def _too_long(self, rid: str) -> str:
        """Why the pools, even when empty, could not take the tokens that a request has now and two pages more."""
        pools, req = self.world.pools, self.world.requests[rid]
        pages = (len(req.origin_input_ids) + len(req.output_ids)) // PAGE + 3
        small = [name for name in UNITS if getattr(pools, name).size < pages * PAGE]
        return f": {', '.join(small)} too small for its {pages - 2} pages and two" if small else ""

    def _news(self) -> list[str]:
        found = self.world.findings[self.told :]
        self.told = len(self.world.findings)
        return found


def _refuse_from_now_on(*_) -> None:
    """For the plugin no pool has room for anybody; `World.again` undoes it."""
    Admission.lacking = lambda *_: ["host"]


PLANTED = {
    "refused": _refuse_from_now_on,
    "freed-twice": lambda w, _, slot: w.pools.host.free(w.coordinator.req_to_host_pool[slot, :1]),
    "corrupted-row": lambda w, rid, _: w.corrupt_host_row(rid, 0),
}


def crash(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    calls = [f"{f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames]
    return f"{type(error).__name__}: {error} in {' > '.join(calls[-6:])}"


def lines(text: str) -> Iterator[str]:
    """The events of a script; `#` begins a remark."""
    for line in text.splitlines():
        if event := line.split("#")[0].strip():
            yield event


def _value(word: str) -> int | str:
    return int(word) if word.isdigit() else word
