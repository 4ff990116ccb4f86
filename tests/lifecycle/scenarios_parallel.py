"""One scheduler of several: what a pipeline stage other than the first sees, and one whose transfers take longer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

from .scenarios import finish, scenario
from .world import World

FIRST_LAYER = 30


@scenario
def pipeline_stage(w: World) -> None:
    """Layers 30 and 31 of a model; attention asks for them by these numbers."""
    pool, swap_in = w.coordinator.mem_pool_device, w.coordinator.swap_in_selected_pages
    pool.start_layer, pool.end_layer = FIRST_LAYER, FIRST_LAYER + pool.layer_num

    def asked(req_pool_indices, seq_lens, top_k, layer):
        return swap_in(req_pool_indices, seq_lens, top_k_result=top_k, layer_id=layer + FIRST_LAYER)

    w.coordinator.swap_in_selected_pages = asked
    w.submit("grows", prompt=110, output=24)
    w.submit("long", prompt=600, output=24)
    w.run_until(lambda: w.ends("grows") and w.ends("long"))
    finish(w)


class Slow:
    """The end of a transfer that is there when somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


@scenario
def stages_agree(w: World) -> None:
    """Of two stages, the one whose transfer takes longer lets the request decode in the same pass as the other."""
    collect, module = w.coordinator.collect_ready_reqs, sys.modules[type(w.coordinator).__module__]
    group = sys.modules["sglang.srt.distributed.parallel_state"].get_pp_group()
    told = SimpleNamespace(pp_size=2)  # where SGLang keeps the number of stages, from 0.5.18

    def of_two():
        with (
            mock.patch.object(group, "world_size", 2),
            mock.patch.object(module, "get_parallel", lambda: told, create=True),
        ):
            return collect()

    w.coordinator.collect_ready_reqs = of_two
    w.submit("first", prompt=200, output=12)
    w.run_until(lambda: w.staging("first"))
    queue = w.coordinator.ack_staging_queue
    queue[:] = [act._replace(finish_event=Slow()) for act in queue]
    w.run(1)
    w.expect(w.decoding("first"), "a stage waits for its own transfer, and the other stages do not")
    w.release_staging()
    w.run_until(lambda: w.ends("first"))
    finish(w)
