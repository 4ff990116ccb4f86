"""Any sequence of events, found and shrunk by Hypothesis, on the real scheduler of one release.

Sequences are played in a fork of a scheduler that has just been built, one after the other as long as each leaves the
server at rest. After every event the world has audited pools, rows and replies; evidence that something is wrong ends
the sequence. It is played once more in a fork of its own, and fails the machine unless what it shows is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .fork import AGAIN, Fork

REUSED = 100
"""Sequences that one fork plays at most."""
ASKED = ("", " top=0", "", " top=2", "", " top=1 named=1")
"""The logprobs that a request wants. Told from its size: a choice of its own would make other sequences of all."""
LONGEST = 960
"""Tokens of a prompt; the next request's ids begin 1000 after its own."""


class Found(AssertionError):
    """Evidence of a defect."""


class FoundLate(BaseException):
    """Evidence that only shows after the sequences before it, which Hypothesis cannot shrink; so no `Exception`."""


@dataclass
class Hunt:
    """What a run of the machine is told, and what comes out of it."""

    scheduler: object
    planted: str = ""
    """A bug that is planted somewhere in each sequence, and must be found: the control."""
    roomy: bool = False
    """All pools as large as they can be, so that what is found is not always their exhaustion."""
    classify: Callable[[str], str | None] = lambda evidence: None
    """The name under which evidence is known; None fails the machine."""
    sequences: int = 0
    events: int = 0
    audits: int = 0
    """Iterations after which pools and rows were audited, in sequences that came to their end."""
    ended: set[str] = field(default_factory=set)
    """Every script that the server played to its end and came to rest after."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How often each kind of event was played."""
    known: dict[str, tuple[int, list[str], str]] = field(default_factory=dict)
    """The first sequence that showed it, its lines, and the evidence."""
    failure: tuple[list[str], str] | None = None
    """The smallest script so far, and its evidence."""
    fork: Fork | None = None
    """Has come to rest, and may play one more sequence."""
    before: list[list[str]] = field(default_factory=list)
    """What it has played."""
    audited: int = 0
    """What it had audited when it began with the last sequence."""

    def server(self) -> Fork:
        if self.fork is None:
            self.fork, self.before = Fork(self.scheduler), []
        elif self.before:
            self.fork.play(AGAIN)
        self.audited = self.fork.audits
        return self.fork

    def came_to_rest(self, lines: list[str]) -> None:
        assert self.fork
        self.ended.add("\n".join(lines))
        self.audits += self.fork.audits - self.audited
        self.before.append(lines)
        if self.failure or len(self.before) == REUSED:  # what is shrunk must not depend on what was before
            self.give_up()

    def give_up(self) -> None:
        """The server is not as it was, or nobody knows."""
        if self.fork:
            self.fork.close()
            self.fork = None

    def confirmed(self, lines: list[str], evidence: list[str]) -> list[str]:
        """The evidence that the same events show when nothing was played before.

        Raises:
            FoundLate: none; `failure` then has everything that was.
        """
        self.give_up()
        if not self.before:
            return evidence
        alone = Fork(self.scheduler)
        try:
            for line in lines:
                if found := alone.play(line):
                    return found
        finally:
            alone.close()
        self.failure = [line for story in self.before for line in (*story, AGAIN)] + lines, "; ".join(evidence)
        raise FoundLate


def lengths() -> st.SearchStrategy[int]:
    """Of prompts: around pages, the hot buffer and chunks, where things change, and anywhere."""
    borders = [1, 2, 60, 64, 65, 110, 120, 127, 128, 129, 192, 511, 512, 513, 600]
    return st.sampled_from(borders) | st.integers(1, LONGEST)


def answers() -> st.SearchStrategy[int]:
    """Tokens of an answer: mostly few, for each costs an iteration."""
    return st.integers(1, 8) | st.sampled_from([12, 24])


class Machine(RuleBasedStateMachine):
    hunt: ClassVar[Hunt]
    asks: ClassVar[bool] = True
    """For logprobs."""

    def __init__(self) -> None:
        super().__init__()
        self.hunt.sequences += 1
        self.world = self.hunt.server()
        self.lines: list[str] = []
        self.rids: list[str] = []
        self.over = self.paused = self.holding = self.squeezed = self.priorities = self.busy = False

    def play(self, line: str) -> None:
        self.lines.append(line)
        self.hunt.events += 1
        self.hunt.kinds[line.split(maxsplit=1)[0]] += 1
        evidence = self.world.play(line)
        if not evidence:
            return
        self.over = True
        evidence = self.hunt.confirmed(self.lines, evidence)
        names = [self.hunt.classify(what) for what in evidence]
        if None in names:
            self.hunt.failure = list(self.lines), "; ".join(evidence)
            raise Found("\n".join([*self.lines, *evidence]))
        for name, what in zip(names, evidence, strict=True):
            shown = self.hunt.known.get(name)
            if shown is None or len(shown[1]) > len(self.lines):
                first = shown[0] if shown else self.hunt.sequences
                self.hunt.known[name] = first, list(self.lines), what

    @initialize(
        device=st.integers(4, 16),
        more=st.integers(0, 16),
        host=st.just(32) | st.integers(4, 32),
        slots=st.integers(1, 4),
        priorities=st.booleans(),
    )
    def start(self, device: int, more: int, host: int, slots: int, priorities: bool) -> None:
        if self.hunt.roomy:
            device, more, host = 16, 16, 32
        self.play(f"pools logical={device + more} device={device} host={host * 64} slots={slots}")
        self.priorities = priorities
        if priorities:
            self.play("priorities")

    @precondition(lambda self: not self.over and len(self.rids) < 12)
    @rule(prompt=lengths(), output=answers(), priority=st.integers(0, 3))
    def arrive(self, prompt: int, output: int, priority: int) -> None:
        rid = f"r{len(self.rids)}"
        self.rids.append(rid)
        rank = f" priority={priority}" if self.priorities else ""
        stops = " ignore_eos=0" if (prompt // 2 + priority) % 2 and not self.hunt.roomy else ""  # as most clients
        asked = ASKED[(prompt + output) % len(ASKED)] if self.asks and not self.hunt.roomy else ""
        self.play(f"arrive {rid} prompt={prompt} output={output}{rank}{stops}{asked}")

    @precondition(lambda self: not self.over and len(self.rids) < 9)
    @rule(prompts=st.lists(st.sampled_from([20, 60, 110, 120, 300]), min_size=2, max_size=4), output=answers())
    def crowd(self, prompts: list[int], output: int) -> None:
        """Some at once, and far enough for them to decode."""
        for prompt in prompts:
            if not self.over:
                self.arrive(prompt, output, 0)
        if not self.over:
            self.go_on()

    def go_on(self) -> None:
        self.play("run 5")

    @precondition(lambda self: not self.over and self.rids)
    @rule()
    def retract(self) -> None:
        self.play("retract")

    @precondition(lambda self: not self.over and self.rids)
    @rule(turns=st.sampled_from([1, 2, 3, 5, 9]))
    def run(self, turns: int) -> None:
        self.play(f"run {turns}")

    @precondition(lambda self: not self.over and self.rids)
    @rule(which=st.integers(0, 11))
    def abort(self, which: int) -> None:
        self.play(f"abort {self.rids[-1 - which % len(self.rids)]}")

    @precondition(lambda self: not self.over and not self.holding)
    @rule()
    def hold(self) -> None:
        self.holding = True
        self.play("hold")

    @precondition(lambda self: not self.over and self.holding)
    @rule(oldest=st.none() | st.integers(1, 3))
    def release(self, oldest: int | None) -> None:
        self.holding = False
        self.play("release" if oldest is None else f"release {oldest}")

    @precondition(lambda self: not self.over and self.rids and not self.squeezed and not self.hunt.roomy)
    @rule(pool=st.sampled_from(["logical", "logical", "device", "host"]), keep=st.integers(1, 3))
    def squeeze(self, pool: str, keep: int) -> None:
        self.squeezed = True
        self.play(f"squeeze {pool} {keep}")

    @precondition(lambda self: not self.over and self.squeezed)
    @rule()
    def relax(self) -> None:
        self.squeezed = False
        self.play("relax")

    @precondition(lambda self: not self.over and self.rids and not self.paused)
    @rule(mode=st.sampled_from(["retract", "in_place"]))
    def pause(self, mode: str) -> None:
        self.paused = True
        self.play(f"pause {mode}")

    @precondition(lambda self: not self.over and self.paused)
    @rule()
    def resume(self) -> None:
        self.paused = False
        self.play("resume")

    @precondition(lambda self: not self.over and self.rids and not self.squeezed)  # a flush frees what others hold
    @rule()
    def flush(self) -> None:
        self.play("flush")

    @precondition(lambda self: not self.over and self.rids and self.hunt.planted)
    @rule()
    def plant(self) -> None:
        self.play(f"plant {self.hunt.planted}")

    @precondition(lambda self: self.over)
    @rule()
    def nothing(self) -> None:
        """What was found ended the sequence."""

    def teardown(self) -> None:
        if self.over:
            return
        if self.lines:
            self.play("end")
        if not self.over:
            self.hunt.came_to_rest(self.lines)


class DecodeMachine(Machine):
    """The decode side of PD disaggregation: prompts come with their KV, which is on its way for a while."""

    hold = release = None
    """Nothing is staged: KV is transferred to the host."""
    asks = False
    """The logprob of the first token comes with the KV, and the prefill worker that stands in sends none."""

    def go_on(self) -> None:
        self.play("land")
        if not self.over:
            self.play("run 5")

    @precondition(lambda self: not self.over and self.rids)
    @rule(which=st.integers(0, 11), how=st.sampled_from(["part", "land", "land", "land", "fail"]))
    def transfer(self, which: int, how: str) -> None:
        self.play(f"{how} {self.rids[-1 - which % len(self.rids)]}")

    @precondition(lambda self: not self.over and self.rids and self.hunt.planted)
    @rule()
    def plant(self) -> None:
        """Where it can be found: what is on its way would be written anew."""
        self.play("land")
        if not self.over:
            self.play(f"plant {self.hunt.planted}")

    @precondition(lambda self: not self.over and self.rids)
    @rule(turns=st.sampled_from([1, 2, 5]))
    def land_all(self, turns: int) -> None:
        self.play("land")
        if not self.over:
            self.play(f"run {turns}")

    @precondition(lambda self: not self.over)
    @rule()
    def answer_late(self) -> None:
        """The prefill worker sends KV first, and answers when it has time."""
        self.busy = not self.busy
        self.play("busy" if self.busy else "catch_up")

    @precondition(lambda self: not self.over and self.rids)
    @rule(which=st.integers(0, 11), late=st.sampled_from(["part", "land", "fail"]))
    def abort_on_its_way(self, which: int, late: str) -> None:
        """What was still being sent arrives after others have come, or what was to be sent is sent long after."""
        rid = self.rids[-1 - which % len(self.rids)]
        self.play(f"abort {rid}")
        for _ in range(2 * (which > 7)):
            if not self.over:
                self.play("wait 20")
        if not self.over and len(self.rids) < 12:
            self.arrive(200, 2, 0)
        if not self.over:
            self.play(f"{late} {rid}")


def configured(sequences: int, steps: int, shrink: bool) -> settings:
    return settings(
        max_examples=sequences,
        stateful_step_count=steps,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
