"""What the flags come to: rows, slots and pinned bytes, by the formulas of `sizing`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..sizing import formulas, shapes
from .examine import Examined
from .probes import gpu

MOST_LAYERS, MOST_WIDTH = 10_000, 1 << 24  # beyond these, a configuration is damaged
MEM_FRACTION = 0.88  # where none is given; SGLang takes about this on GPUs from 80 GiB on
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """One rank's pools, and how many ranks this host has."""

    server: shapes.Server
    ranks: int
    basis: str
    """Where the number of device slots comes from."""
    certain: bool
    """False: it is an upper limit, for the weights' size is not known."""
    budget_bytes: int | None
    """Device bytes that SGLang divides into slots; None where it is not known."""

    @property
    def rank_bytes(self) -> int:
        """Host bytes that one rank pins."""
        return formulas.pinned_bytes(self.server)

    @property
    def pinned_bytes(self) -> int:
        """Host bytes that all ranks of this host pin: each has a pool of its own."""
        return self.ranks * self.rank_bytes


def release(examined: Examined) -> str:
    """The installed release; the newest known one where it cannot be told."""
    name = str(examined.facts("sglang").get("version", ""))
    try:
        shapes.version(name)
    except shapes.SizingError:
        return shapes.NEWEST
    return name


def kv_dtype(examined: Examined) -> str:
    """As SGLang resolves --kv-cache-dtype for these models: by the GPU, fp8 from Blackwell on."""
    dtype = str(examined.subject.launch.get("kv_cache_dtype", "auto"))
    if dtype == "auto":
        blackwell = any(int(str(g.get("capability") or 0).partition(".")[0]) >= 10 for g in gpu.used(examined))
        return "fp8_e4m3" if blackwell else "bfloat16"
    return {"bf16": "bfloat16"}.get(dtype, dtype)


def architecture(examined: Examined) -> str:
    """The model's first, by which SGLang goes; empty where config.json names none."""
    names = examined.facts("model").get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def model_shape(examined: Examined) -> shapes.ModelShape:
    """Raises SizingError: there is no model, or none whose cache is known."""
    facts = examined.facts("model")
    if "config" not in facts:
        raise shapes.SizingError("no model's configuration is at hand")
    config = {**facts["config"], "architectures": [architecture(examined)]}
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise shapes.SizingError(f"num_hidden_layers is {layers}")
    try:
        model = shapes.ModelShape.from_config(config, str(facts["name"]))
    except (OverflowError, AttributeError, IndexError) as reason:
        raise shapes.SizingError(str(reason)) from reason
    if max(model.kv_lora_rank, model.qk_rope_head_dim, model.index_head_dim, model.index_topk) > MOST_WIDTH:
        raise shapes.SizingError("a dimension is out of all proportion")
    longest = model.max_context if isinstance(model.max_context, int) else None
    return dataclasses.replace(model, max_context=longest)


def hisparse(examined: Examined, model: shapes.ModelShape) -> shapes.HiSparse:
    """Raises SizingError: what is wrong with --hisparse-config. The coordinator's top_k is the model's from 0.5.12."""
    flags = shapes.HiSparse.from_json(examined.subject.launch.get("hisparse_config"))
    if examined.facts("sglang").get("top_k_from_model", True):
        return dataclasses.replace(flags, top_k=model.index_topk)
    return flags


def server(examined: Examined) -> shapes.Server | None:
    """One rank, without device slots; None where something is not known or is refused. Others have said so."""
    launch = examined.subject.launch
    try:
        model = model_shape(examined)
        flags = hisparse(examined, model)
        layers = -(-model.layers // launch.count("pp_size"))
        model = dataclasses.replace(model, layers=layers, shared_index=model.shared_index[:layers])
        requests = max(1, launch.count("max_running_requests") // launch.attention_ranks)
        context = launch.get("context_length") or model.max_context or 0
        return shapes.Server(
            release(examined), model, flags, kv_dtype(examined), 0, requests, context, draft_tokens=launch.drafts
        )
    except shapes.SizingError:
        return None


def sizes(examined: Examined) -> Sizes | None:
    """None where something that they follow from is not known or is refused; others have said so."""
    launch, rank = examined.subject.launch, server(examined) if examined.subject.launch.given else None
    if rank is None:
        return None
    budget, certain = _budget(examined)
    slots = budget // formulas.cell_bytes(rank) if budget is not None else None
    basis = (
        f"{MEM_FRACTION if launch.get('mem_fraction') is None else launch.get('mem_fraction'):g} of the GPU's memory"
    )
    basis += " less the weights" if certain else ", weights not counted"
    if (most := launch.get("max_total_tokens")) and (slots is None or most <= slots):
        slots, basis, certain = most, "--max-total-tokens", True
    if slots is None or slots <= 0:
        return None
    page = rank.hisparse.page_size
    return Sizes(
        dataclasses.replace(rank, device_tokens=slots // page * page), gpu.needed(launch), basis, certain, budget
    )


def _budget(examined: Examined) -> tuple[int | None, bool]:
    """Device bytes for KV and index rows, and whether the weights are taken off."""
    launch, facts = examined.subject.launch, examined.facts("model")
    memory = [g["memory_mib"] << 20 for g in gpu.used(examined) if g.get("memory_mib")]
    if not memory:
        return None, False
    fraction = launch.get("mem_fraction")
    weights = facts.get("weights_bytes") or 0
    share = weights // (launch.count("tp") * launch.count("pp_size"))
    return int(min(memory) * (MEM_FRACTION if fraction is None else fraction)) - share, bool(weights)
