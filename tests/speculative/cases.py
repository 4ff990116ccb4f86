"""What is done with draft tokens: a list of operations, made from a seed, or one in particular.

A list that goes wrong is made shorter while it still does. An operation has a seed of its own, so that what remains
does what it did.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from lifecycle.process import _forked
from lifecycle.server import SLOTS
from torch import Tensor

from sglang_hisparse_plugin.kernels import reference

from .rig import HOT_BUFFER, TOP_K, Rig

Operation = tuple[str, int]
STEPS_PER_CASE, SEEDS = 250, 2
LEAVING = ("finish", "retract", "preempt", "abort")


def operations(seed: int, count: int = STEPS_PER_CASE) -> list[Operation]:
    """Mostly verifications; now and then a request comes or goes, before, after or in the middle of one."""
    chance = random.Random(seed)
    kinds = ["step"] * 40 + ["padded"] * 4 + ["admit"] * 5 + ["audit"] * 2
    kinds += [kind + where for kind in LEAVING for where in ("", " in a step")] + ["gone before a step"] * 2
    return [(chance.choice(kinds), chance.randrange(1 << 30)) for _ in range(count)]


def perform(rig: Rig, todo: list[Operation]) -> int:
    """Do them, up to the first that goes wrong; how many were done."""
    for done, (kind, seed) in enumerate(todo):
        _perform(rig, kind, random.Random(seed))
        if rig.found:
            return done + 1
    rig.end()
    return len(todo)


def _perform(rig: Rig, kind: str, chance: random.Random) -> None:
    if kind == "admit" or not rig.requests:
        if len(rig.requests) < SLOTS:
            rig.admit(prompt(chance))
        return
    longest = max(request.length for request in rig.requests)
    if longest > 480:
        rig.finish(next(request for request in rig.requests if request.length == longest))
    elif kind == "audit":
        rig.audit()
    elif kind in LEAVING:
        getattr(rig, kind)(chance.choice(rig.requests))
    elif kind == "gone before a step":
        rig.step(chance, finish=chance.randrange(len(rig.requests)))
    else:
        leave = kind.partition(" ")[0] if kind.endswith("in a step") else ""
        rig.step(chance, leave, padding=min(2, SLOTS - len(rig.requests)) if kind == "padded" else 0)


def prompt(chance: random.Random) -> int:
    """Shorter than the hot buffer, about as long, or longer."""
    return chance.choice((chance.randint(1, HOT_BUFFER - 8), chance.randint(HOT_BUFFER - 7, HOT_BUFFER + 3), 400))


def random_case(steps: int, seed: int) -> Callable[[object], dict[str, object]]:
    def case(scheduler: object) -> dict[str, object]:
        todo = operations(seed)
        rig, done = _play(scheduler, steps, todo)
        if rig.found:
            todo = _shortest(scheduler, steps, todo[:done])
        found = [*rig.findings(), f"after {todo}"] if rig.found else []
        return {"found": found, "answered": rig.answered, "boundary": rig.boundary, "written": rig.written}

    return case


def _play(scheduler: object, steps: int, todo: list[Operation]) -> tuple[Rig, int]:
    rig = Rig(scheduler, steps)
    return rig, perform(rig, todo)


def _shortest(scheduler: object, steps: int, todo: list[Operation]) -> list[Operation]:
    """Leave operations out while something still goes wrong. The scheduler has been used: only forks of it run."""
    size = len(todo) // 2
    while size:
        for start in range(0, len(todo), size):
            fewer = todo[:start] + todo[start + size :]
            if _forked(lambda fewer=fewer: bool(_play(scheduler, steps, fewer)[0].found)):
                todo = fewer
                break
        else:
            size //= 2
    return todo


def one_by_one(scheduler: object) -> dict[str, object]:
    """Prompts of every length about the hot buffer's, each taken past its end."""
    rig = Rig(scheduler, 3)
    for length in range(HOT_BUFFER - 6, HOT_BUFFER + 4):
        rig.admit(length)
        for seed in range(8):
            rig.step(random.Random(seed))
        rig.finish(rig.requests[0])
        rig.audit()
    rig.end()
    return {"found": [*rig.findings()], "answered": rig.answered, "boundary": rig.boundary, "written": rig.written}


def full(scheduler: object) -> dict[str, object]:
    """As many requests as there are slots, each as long as two buffers, until all have left."""
    rig = Rig(scheduler, 4)
    for _ in range(SLOTS):
        rig.admit(2 * HOT_BUFFER)
    for seed in range(12):
        rig.step(random.Random(seed))
    rig.audit()
    for leave in ("finish", "retract", "finish", "retract"):
        rig.step(random.Random(1), leave)
        rig.audit()
    rig.admit(HOT_BUFFER)  # instead of it the two that were retracted
    for seed in range(4):
        rig.step(random.Random(seed))
    if sorted(request.length // HOT_BUFFER for request in rig.requests) != [2, 2]:
        rig.found.append("the retracted requests did not come back")
    rig.end()
    return {"found": [*rig.findings()], "answered": rig.answered, "boundary": rig.boundary, "written": rig.written}


def leaving(scheduler: object) -> dict[str, object]:
    """Each way to leave, in the middle of a step that goes past the hot buffer's end; the slot is the next one's."""
    rig = Rig(scheduler, 4)
    rig.admit(3 * HOT_BUFFER)  # lives through it all
    for seed, leave in enumerate(LEAVING * 2):
        rig.admit(HOT_BUFFER - 2)
        if len(rig.requests) < 2:
            rig.found.append(f"nobody was admitted before {leave}")
            break
        rig.requests.reverse()  # the new one leaves
        rig.step(random.Random(seed), leave)
        rig.audit()
        rig.step(random.Random(seed))
        for request in rig.requests[1:]:
            rig.finish(request)
    rig.end()
    found = [*rig.findings()]
    return {
        "found": found,
        "answered": rig.answered,
        "boundary": rig.boundary,
        "reused": rig.reused,
        "aborted": rig.aborted,
    }


def gone(scheduler: object) -> dict[str, object]:
    """A request ends between the scheduling of a step and the step: one of many, at each place, and the only one.

    All slots are in use, so that the one who comes instead has the slot of the one who is gone.
    """
    rig = Rig(scheduler, 3)
    for _ in range(SLOTS):
        rig.admit(HOT_BUFFER - 1)
    for place in range(SLOTS):
        rig.step(random.Random(place), finish=place)
        if len(rig.requests) != SLOTS:
            rig.found.append("nobody came instead")
        rig.audit()
        rig.step(random.Random(place))
    for request in rig.requests[1:]:
        rig.finish(request)
    for _ in range(3):
        rig.step(random.Random(1), finish=0)
        rig.audit()
    rig.end()
    return {"found": [*rig.findings()], "answered": rig.answered}


def addresses(scheduler: object) -> dict[str, object]:
    """What a CUDA graph would capture: the tensors of the op's calls, before and after `bind`, step by step."""
    from sglang_hisparse_plugin.speculative import rows

    rig, seen, op = Rig(scheduler, 3), [], rows.swap_in
    rig.admit(2 * HOT_BUFFER)
    own = ("req_pool_indices", "tail_start", "top_k_tokens", "counters")  # the graph's own inputs, and a list

    def looked_at(**call: object) -> None:
        seen.append({name: value.data_ptr() for name, value in call.items() if hasattr(value, "data_ptr")})
        op(**call)

    rows.swap_in = looked_at
    for seed in range(6):
        rig.step(random.Random(seed))
    per_step = len(rig.pools.layers) * rig.steps
    kept = [{name: at for name, at in call.items() if name not in own} for call in seen]
    same = all(kept[i] == kept[i % per_step] for i in range(len(kept)))
    needed = {"seq_lens", "top_k_device_locs", "lru_slots", "device_buffer_tokens", "host_cache_locs", "num_real_reqs"}
    rig.end()
    found = [*rig.findings()]
    found += [] if same and len(seen) == 6 * per_step else ["a tensor has moved"]
    found += [] if needed <= kept[0].keys() else [f"not looked at: {needed - kept[0].keys()}"]
    return {"found": found, "answered": rig.answered}


def single_steps(scheduler: object) -> dict[str, object]:
    """The tables after a verification are those after as many single steps, which the op's oracle takes on copies."""
    rig = Rig(scheduler, 3)
    c, op = rig.coordinator, rig.rows.swap_in

    def beside(layer: int, batch: Any, selected: Tensor) -> Tensor:
        tokens, order = c.req_device_buffer_tokens[layer].clone(), c.lru_slots[layer].clone()
        buffer = c.mem_pool_device.kv_buffer[layer].clone()
        for step, asked in enumerate(selected.unflatten(0, (-1, rig.steps)).unbind(1)):
            reference.swap_in(
                top_k_tokens=asked,
                device_buffer_tokens=tokens,
                host_cache_locs=c.req_to_host_pool,
                device_buffer_locs=c.req_device_buffer_token_locs[layer],
                host_cache=c.mem_pool_host.kv_buffer[layer],
                device_buffer=buffer,
                top_k_device_locs=torch.empty_like(asked),
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens + step + 1,
                tail_start=batch.seq_lens,
                lru_slots=order,
                item_size_bytes=c.mem_pool_host.token_stride_size,
                num_top_k=TOP_K,
                hot_buffer_size=HOT_BUFFER,
            )
        found = op(layer, batch, selected)
        if not torch.equal(tokens, c.req_device_buffer_tokens[layer]):
            rig.found.append(f"layer {layer}: the buffer holds other tokens than after single steps")
        if not torch.equal(order, c.lru_slots[layer]):
            rig.found.append(f"layer {layer}: the LRU order is not that of single steps")
        return found

    rig.rows.swap_in = beside
    rig.admit(2 * HOT_BUFFER)
    rig.admit(HOT_BUFFER - 4)
    for seed in range(6):
        rig.step(random.Random(seed))
    rig.end()
    return {"found": [*rig.findings()], "answered": rig.answered}


def host_row(scheduler: object) -> dict[str, object]:
    """Control: one host row is wrong."""
    return _control(scheduler, lambda rig: rig.corrupt_host_row(rig.requests[0], 5))


def no_settle(scheduler: object) -> dict[str, object]:
    """Control: one verification's rows are not put in their places."""
    return _control(scheduler, lambda rig: setattr(rig, "skip_settle", True))


def not_told(scheduler: object) -> dict[str, object]:
    """Control: nobody tells the coordinator that a request has left in the middle of a step."""
    rig = Rig(scheduler, 4)
    rig.admit(HOT_BUFFER)
    rig.admit(HOT_BUFFER)
    for seed in range(3):
        rig.step(random.Random(seed))
    before = [*rig.findings()]
    told = rig.coordinator.request_finished
    rig.coordinator.request_finished = lambda req: None
    rig.step(random.Random(3), "finish")
    rig.coordinator.request_finished = told
    rig.end()
    return {"found": [*rig.findings()], "before": before}


def wrong_home(scheduler: object) -> dict[str, object]:
    """Control: rows that a step writes before the hot buffer's end do not come to the slots of their positions."""

    def harm(rig: Rig) -> None:
        rig.admit(HOT_BUFFER - 8)
        pool = rig.coordinator.mem_pool_device
        pool.transfer_values_on_device = lambda *_args, **_kwargs: None

    return _control(scheduler, harm)


def too_many(scheduler: object) -> dict[str, object]:
    """Control: queries select more rows than the hot buffer has; the last evicts what the first was answered.

    Five steps seldom select that much anew; so these are not right to begin with, and nothing else harms them.
    """
    return _control(scheduler, lambda rig: None, steps=HOT_BUFFER // TOP_K + 1) | {"before": []}


def _control(scheduler: object, harm: Callable[[Rig], None], steps: int = 4) -> dict[str, object]:
    """Five steps that are right, then harm, then what is seen of it."""
    rig = Rig(scheduler, steps)
    rig.admit(3 * HOT_BUFFER)
    for seed in range(5):
        rig.step(random.Random(seed))
    before = [*rig.findings()]
    harm(rig)
    for seed in range(5, 40):
        rig.step(random.Random(seed))
    return {"found": [*rig.findings()], "before": before}


CASES: dict[str, Callable[[object], dict[str, object]]] = {
    **{f"random-{n}-drafts-{seed}": random_case(n, seed) for n in (2, 3, 4) for seed in range(SEEDS)},
    "about-the-hot-buffer": one_by_one,
    "full": full,
    "leaving": leaving,
    "gone": gone,
    "addresses": addresses,
    "single-steps": single_steps,
    "control-host-row": host_row,
    "control-no-settle": no_settle,
    "control-not-told": not_told,
    "control-wrong-home": wrong_home,
    "control-too-many": too_many,
}
