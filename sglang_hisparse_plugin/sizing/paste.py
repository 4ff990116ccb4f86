"""The flags of a plan, complete but for the model's path. Standard library only."""

from __future__ import annotations

import shlex

from . import headroom
from .given import Machine, Workload, mem_fraction
from .plan import Fit


def flags(work: Workload, machine: Machine, fit: Fit) -> list[str]:
    """One flag with its value, as a shell reads them, in each entry."""
    server, layout = fit.server, machine.layout
    graphs = headroom.graph_batch(machine.gpu, layout.tp, fit.requests)
    found = [
        *layout.flags(),
        "--enable-hisparse",
        "--disable-radix-cache",
        f"--hisparse-config {shlex.quote(server.hisparse.to_json())}",
        f"--kv-cache-dtype {server.kv_dtype}",
        f"--page-size {server.hisparse.page_size}",
        f"--context-length {server.context}",
        f"--max-running-requests {fit.requests * layout.attention_dp}",
        f"--max-total-tokens {server.device_tokens}",
        f"--mem-fraction-static {mem_fraction(work, machine, fit.requests) / 1000:.3f}",
        f"--cuda-graph-max-bs{'-decode' if server.version >= (0, 5, 14) else ''} {graphs}",
    ]
    if work.draft_tokens:
        found += [
            "--speculative-algorithm EAGLE",
            f"--speculative-num-steps {work.draft_tokens - 1}",
            "--speculative-eagle-topk 1",
            f"--speculative-num-draft-tokens {work.draft_tokens}",
        ]
    return found
