"""One of two ranks of a decode worker: the queue of `test_given_up`, joined to the other rank's by gloo.

    python -m overlays.two_ranks RANK PORT

Prints JSON: whose transfers SGLang is left to poll in each pass. It polls them by one reduction over all of them, which
goes wrong, or waits for ever, where the ranks have different ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import torch

from sglang_hisparse_plugin.overlays import late_transfer

from .test_given_up import FAILED, SUCCESS, Rank, abort

WAITS_S = 30


def main(rank: int, port: int) -> None:
    torch.distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=WAITS_S), world_size=2, rank=rank
    )
    base = sys.modules["sglang.srt.disaggregation.base"] = ModuleType("base")
    vars(base)["KVPoll"] = SimpleNamespace(Success=SUCCESS)
    worker = Rank("a", "b", "c")
    queue = worker.disagg_decode_transfer_queue
    queue.gloo_group = torch.distributed.group.WORLD
    first, _, last = queue.queue

    def polled() -> list[str]:
        seen: list[str] = []

        def poll(queue) -> None:
            seen.extend(entry.req.rid for entry in queue.queue)
            states = torch.tensor([ord(rid) for rid in seen])
            together = states.clone()
            torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MIN, group=queue.gloo_group)
            assert together.tolist() == states.tolist()

        late_transfer.pop_transferred(poll, queue)
        return sorted(seen)

    told = [polled()]
    abort(worker, "a")
    told.append(polled())
    if rank == 0:
        first.kv_receiver.kv_mgr.request_status[1] = SUCCESS
    else:
        last.kv_receiver.conclude_state = FAILED  # its metadata could not be sent, which only this rank knows
    told.append(polled())
    alone = late_transfer._is_over(first)
    first.kv_receiver.kv_mgr.request_status[1] = SUCCESS
    told.append(polled())
    print(json.dumps({"told": told, "alone": alone}), flush=True)
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add("done", 1)  # who leaves first takes the other's connection with it
    while rank == 0 and store.add("done", 0) < 2:
        time.sleep(0.02)
    os._exit(0)  # gloo's threads have nothing more to do, and complain of whoever has left


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
