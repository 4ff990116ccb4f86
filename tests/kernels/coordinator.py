"""In a process of one release: the real coordinator's methods on a small world, with the overlay `swap-in` applied.

Every kernel of SGLang that the coordinator imported is replaced by a trap first, so that an answer can only be ours.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.managers import hisparse_coordinator as module
from world import World

from sglang_hisparse_plugin import installation
from sglang_hisparse_plugin.overlays import swap_in
from sglang_hisparse_plugin.patching import engine
from sglang_hisparse_plugin.patching.hooker import WraptHooker

TOP_K, HOT, REQUESTS, CONTEXT = 8, 16, 3, 60


def trap(name):
    def kernel(*args, **kwargs):
        raise LookupError(f"SGLang's {name} was called")

    return kernel


def coordinator(world: World):
    """A coordinator with what its swap-in methods read; layer 1 has caches of its own."""
    self = object.__new__(module.HiSparseCoordinator)
    host, device = [world.host, world.host.flip(0)], [world.cache, torch.zeros_like(world.cache)]
    vars(self).update(
        top_k=TOP_K,
        device_buffer_size=HOT,
        top_k_device_locs_buffer=torch.full((REQUESTS, TOP_K), -1, dtype=torch.int32),
        req_device_buffer_tokens=world.tokens[None],
        req_device_buffer_token_locs=world.locs[None],
        req_to_host_pool=world.host_locs,
        lru_slots=world.lru[None],
        mem_pool_host=SimpleNamespace(kv_buffer=host, token_stride_size=world.item),
        mem_pool_device=SimpleNamespace(kv_buffer=device),
        item_size_bytes=world.item,
        is_dsv4_hisparse=False,
        swap_in_block_size=960,
        skip_io=False,
        enable_prefetch=False,
        _prefetch_copy_blocks=4,
        _miss_src=torch.zeros(REQUESTS, TOP_K, dtype=torch.int64),
        _miss_dst=torch.zeros(REQUESTS, TOP_K, dtype=torch.int32),
        _miss_count=torch.zeros(REQUESTS, dtype=torch.int32),
    )
    return self


def main() -> None:
    tree, ledger = installation.find().tree, engine.Ledger()
    for hook in swap_in.OVERLAY.hooks(tree):
        home, name = hook.target.split(":")
        trapped = trap(name)
        setattr(sys.modules[home], name, trapped)
        setattr(module, name, trapped)
    overlays = (swap_in.OVERLAY,)
    engine.apply(overlays, tree, engine.plan(overlays, tree), lambda _target: WraptHooker(), ledger)
    engine.verify(overlays, ledger)
    world = World(requests=REQUESTS, context=CONTEXT, top_k=TOP_K, hot=HOT, item=13, seed=3)
    c = coordinator(world)

    def op(*, top_k_tokens, top_k_device_locs, req_pool_indices, seq_lens, num_real_reqs, **_):
        c.num_real_reqs = num_real_reqs
        locs = c.swap_in_selected_pages(req_pool_indices, seq_lens, top_k_tokens[:, :TOP_K].contiguous(), 0)
        top_k_device_locs[:, :TOP_K] = locs

    lengths, steps = [HOT - 3, 30, 45], 12
    world.fill_in_order(0)
    for step in range(steps):
        lengths = [length + 1 for length in lengths]
        selected = [world.choose(length) for length in lengths]
        world.step(op, [0, 1, 2], selected, lengths, real=3 - step % 2)

    planned = 0
    if hasattr(c, "_run_copy_only_kernel"):
        c.num_real_reqs = torch.tensor([2], dtype=torch.int32)
        selected = torch.tensor([world.choose(length) for length in lengths], dtype=torch.int32)
        c._run_swap_in_kernel(torch.arange(3), torch.tensor(lengths), selected, 0, record_plan=True)
        c._run_copy_only_kernel(3, 1)
        host, device = c.mem_pool_host.kv_buffer[1], c.mem_pool_device.kv_buffer[1]
        expected = torch.zeros_like(device)
        for row in range(2):
            for m in range(int(c._miss_count[row])):
                expected[c._miss_dst[row, m]] = host[c._miss_src[row, m]]
                planned += 1
        assert torch.equal(device, expected)

    spoken = "nothing"
    if hasattr(module, "load_cache_to_device_buffer_dsv4_mla"):
        c.is_dsv4_hisparse = True
        try:
            c.swap_in_selected_pages(torch.arange(3), torch.tensor(lengths), torch.zeros(3, TOP_K).int(), 0)
        except LookupError as error:
            spoken = str(error)
    print(json.dumps({"outcome": str(ledger.outcomes), "steps": steps, "planned": planned, "dsv4": spoken}))


main()
