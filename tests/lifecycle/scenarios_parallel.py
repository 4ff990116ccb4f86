"""One scheduler of several: what a pipeline stage other than the first sees."""

from __future__ import annotations

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
