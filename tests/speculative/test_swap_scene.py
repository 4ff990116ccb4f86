"""The scene in which swap-ins of a verification are timed: right answers pass, each kind of wrong one is seen."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "speculative"))

import swap_scene
from swap_scene import SCRATCH, Calls, Cell, Load, Union, Upstream, Way

from sglang_hisparse_plugin.demo.cpu.swap_in import load_cache_to_device_buffer_spec_mla

CELLS = [Cell(b, n, m, 24, top_k=64, context=1024) for b in (1, 3) for n in (2, 4) for m in (0, 12)]


def way(kind: type[Way], cell: Cell) -> Way:
    host = swap_scene.host_memory(cell.batch * cell.context, cell.row_bytes, pinned=False)
    return kind(Load(cell, 3, host, torch.device("cpu")))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [Calls, Union])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_right_answers_pass_and_again_after_a_reset(kind: type[Way], cell: Cell) -> None:
    tried = way(kind, cell)
    tried.check()
    tried.check()


def upstream(selected: Any, *tables: Any) -> None:
    """The CPU's stand-in for SGLang's kernel, which is given what SGLang gives it: tables without gaps between rows."""
    for table in (selected, *tables[:4], *tables[5:13]):
        assert table.stride() == torch.empty(table.shape).stride()
    tokens, host_locs, locs, host, cache, out, requests, lengths, index, policy, scratch, state, real, page, *none = (
        tables
    )
    assert scratch.shape == (requests.numel(), SCRATCH) and page == 64 and len(none) == 3
    load_cache_to_device_buffer_spec_mla(
        top_k_tokens=selected,
        device_buffer_tokens=tokens,
        host_cache_locs=host_locs,
        device_buffer_locs=locs,
        host_cache=host,
        device_buffer=cache,
        top_k_device_locs=out,
        req_pool_indices=requests,
        seq_lens=lengths,
        state=SimpleNamespace(cache_index=index, cache_policy=policy[1:], scratch_locs=scratch, scratch_state=state),
        num_real_reqs=real,
    )


class UpstreamOnCpu(Upstream):
    kernel = staticmethod(upstream)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_sglangs_way_is_given_its_tables(cell: Cell) -> None:
    way(UpstreamOnCpu, cell).check()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_what_is_selected(cell: Cell) -> None:
    """Distinct positions that the query can see, its own draft token among them; new ones as many as the cell says."""
    load = way(Calls, cell).load
    seen = [set(each.flatten(1)[0].tolist()) for each in load.timed]
    for selected in load.timed:
        for step in range(cell.drafts):
            query = selected[:, step]
            assert all(len(set(row.tolist())) == cell.top_k for row in query)
            assert bool((query.max(1).values == cell.context + step).all())
    always = set.intersection(*seen)
    assert [len(tokens - always) for tokens in seen] == [cell.misses] * len(seen)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [Calls, Union])
def test_a_wrong_row_of_the_host_is_seen(kind: type[Way]) -> None:
    tried = way(kind, CELLS[-1])
    missed = set(tried.load.timed[0][0].flatten().tolist()) - set(tried.load.warm[-1][0].flatten().tolist())
    tried.load.host[tried.load.host_locs[0, missed.pop()]] += 1
    with pytest.raises(RuntimeError, match="rows are wrong"):
        tried.check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_row_too_many_is_seen() -> None:
    tried = way(Calls, CELLS[-1])
    always = tried.load.order[0, 0]  # selected in every verification
    tried._kept[0][0, tried.tokens[0] == always] = -1
    with pytest.raises(RuntimeError, match="rows were copied, not 12"):
        tried.check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_draft_token_that_is_looked_up_elsewhere_is_seen() -> None:
    tried = way(Union, CELLS[-1])
    tried.lengths += 1
    with pytest.raises(RuntimeError, match="rows are wrong"):
        tried.check()
