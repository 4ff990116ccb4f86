"""The concurrency of a plan is the largest there is, by trying every ratio."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from sglang_hisparse_plugin.sizing import formulas, given, plan
from sglang_hisparse_plugin.sizing.layout import Layout
from sglang_hisparse_plugin.sizing.shapes import HiSparse, ModelShape, SizingError

GIB, TB = 1 << 30, 10**12
MODEL = ModelShape(layers=61, draft_layers=1)
MACHINE = given.Machine(139 * GIB, 80 * GIB, None, 2 * TB, 64 * GIB, Layout(8, 8, True))
PAGE = 64


def fits(work: given.Workload, machine: given.Machine, requests: int) -> bool:
    """Whether any ratio at all, with the fewest slots it takes, runs so many requests."""
    slots, tokens = plan.slots_needed(work, requests), requests * work.total + PAGE
    for ratio in range(1, 2 + tokens // slots):
        pages = max(-(-slots // PAGE), -(-tokens // (ratio * PAGE)))
        server = work.server(pages * PAGE, ratio, requests)
        if plan.device_bytes(server) > given.device_budget(work, machine, requests):
            continue
        if formulas.total(server, "host") <= machine.host_budget:
            return True
    return False


CASES = [
    *product(("0.5.23",), ("bfloat16", "fp8_e4m3"), (32768, 65536, 131072), (2048, 4096, 6144), (1, 2), (0,)),
    *product(("0.5.10.post1",), ("bfloat16",), (65536, 131072), (2048, 6144), (1, 2), (0,)),
    *product(("0.5.23",), ("fp8_e4m3",), (16384, 65536), (4096, 8192), (1,), (2,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_ratio_would_fit_more(case: tuple[str, str, int, int, int, int]) -> None:
    release, kv_dtype, prompt, buffer, host_tb, drafts = case
    work = given.Workload(release, MODEL, HiSparse(2048, buffer), kv_dtype, prompt, 2048, drafts)
    machine = replace(MACHINE, host=host_tb * TB)
    found = plan.with_hisparse(work, machine)
    assert fits(work, machine, found.requests)
    assert not any(fits(work, machine, found.requests + more) for more in (1, 2, 3, 5, 8))
    server = found.server
    assert server.device_tokens >= plan.slots_needed(work, found.requests)
    assert server.logical_tokens >= found.requests * work.total + PAGE
    assert found.device_bytes <= given.device_budget(work, machine, found.requests)
    assert found.host_bytes <= machine.host_budget


def test_a_case_in_which_the_device_would_like_another_ratio_than_the_host() -> None:
    """22 with the two ratios next to the fewest slots; 24 with ratio 7 (worked out by trying all, by hand)."""
    work = given.Workload("0.5.23", MODEL, HiSparse(2048, 6144), "bfloat16", 65536, 2048)
    machine = replace(MACHINE, weights=86_250_000_000, reserve=12 * GIB, host=TB)
    fit = plan.with_hisparse(work, machine)
    assert (fit.requests, fit.server.hisparse.host_to_device_ratio, fit.limit) == (24, 7, "host memory")


def test_a_plan_that_ends_where_one_request_does() -> None:
    work = given.Workload("0.5.23", MODEL, HiSparse(), "bfloat16", 131072, 2048)
    least = formulas.total(list(plan.servers(work, 1))[-1], "host")
    enough = replace(MACHINE, host=8 * least + 64 * GIB)
    assert plan.with_hisparse(work, enough).requests == 1
    with pytest.raises(SizingError, match="host memory is too small"):
        plan.with_hisparse(work, replace(enough, host=8 * least + 64 * GIB - 8))
