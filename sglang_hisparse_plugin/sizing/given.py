"""What a plan is made for: a machine's memory and what is served, and how much of a GPU that leaves to the pools."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import headroom
from .amounts import round_up
from .layout import Layout
from .shapes import HiSparse, ModelShape, Server, version

#: Requests of one rank that SGLang goes to by itself at most (resolve_max_num_reqs).
MOST_REQUESTS = 4096
#: Of --mem-fraction-static, in thousandths; the rest of a GPU is less than a CUDA context and its graphs take.
MOST_FRACTION = 990


@dataclass(frozen=True)
class Machine:
    """Memory of one rank; bytes."""

    gpu: int
    weights: int
    """Of one GPU."""
    reserve: int | None
    """Kept free on the GPU for activations and CUDA graphs; None for what SGLang itself keeps."""
    host: int
    """Of the node."""
    host_reserve: int
    """Kept free on the node; SGLang itself insists on 10 GiB."""
    layout: Layout = field(default_factory=Layout)

    @property
    def host_budget(self) -> int:
        return (self.host - self.host_reserve) // self.layout.ranks_per_node


@dataclass(frozen=True)
class Workload:
    """What is served."""

    release: str
    model: ModelShape
    hisparse: HiSparse
    """Its ratio is not taken: it is worked out."""
    kv_dtype: str
    prompt: int
    output: int
    draft_tokens: int = 0
    most_requests: int = MOST_REQUESTS

    @property
    def total(self) -> int:
        """Tokens of a request at its end, in whole pages."""
        page = self.hisparse.page_size
        return round_up(self.prompt + self.output + self.draft_tokens, page)

    def server(self, device_tokens: int, ratio: int, requests: int) -> Server:
        return Server(
            release=self.release,
            model=self.model,
            hisparse=replace(self.hisparse, host_to_device_ratio=ratio),
            kv_dtype=self.kv_dtype,
            device_tokens=device_tokens,
            requests=requests,
            context=self.prompt + self.output,
            draft_tokens=self.draft_tokens,
        )


def own_reserve(work: Workload, machine: Machine, requests: int) -> int:
    """Bytes that SGLang itself keeps free for activations and CUDA graphs of so many requests on a rank."""
    layout = machine.layout
    return headroom.reserve(
        machine.gpu,
        version(work.release),
        tp=layout.tp,
        dp_attention=layout.attention_dp,
        requests=requests,
        drafts=bool(work.draft_tokens),
    )


def reserve(work: Workload, machine: Machine, requests: int) -> int:
    """Bytes kept free on the GPU: as given, or SGLang's own."""
    return own_reserve(work, machine, requests) if machine.reserve is None else machine.reserve


def mem_fraction(work: Workload, machine: Machine, requests: int) -> int:
    """--mem-fraction-static in thousandths: all but the reserve, rounded down.

    SGLang takes (free after the weights) - (free before) x (1 - fraction) for the pools, divided by `cell_bytes`. What
    it builds is never less than `cell_bytes` reckons, so a plan within `device_budget` gets its slots.
    """
    return max(0, (machine.gpu - reserve(work, machine, requests)) * 1000 // machine.gpu)


def device_budget(work: Workload, machine: Machine, requests: int) -> int:
    """Bytes for pools and tables."""
    return machine.gpu * mem_fraction(work, machine, requests) // 1000 - machine.weights
