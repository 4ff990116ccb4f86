"""``size``: how many requests fit with and without HiSparse, the flags for it, and what swapping in will cost."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import installation, lines
from ..sizing import estimate, given, hisparse, paste, picture, plan
from ..sizing.layout import Layout
from ..sizing.shapes import (
    KV_DTYPES,
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_WIDTH,
    NEWEST,
    HiSparse,
    ModelShape,
    SizingError,
    version,
)
from .argument_types import any_memory, count, draft_tokens, rates, some_memory

EPILOG = (
    "SIZE: GiB, as SGLang's log counts (139, 139G, 2T), unless decimal bytes are named (141GB, 2TB). TOKENS: as SGLang "
    "reads them (65536, 64Ki; 64k is 64000). Exit codes: 0 it fits, 2 it does not fit, or the input is wrong. "
    "Formulas and sources: sglang_hisparse_plugin/sizing/records.py"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``size``."""
    parser.epilog = EPILOG
    some = count(1, MOST_TOKENS)
    model = parser.add_argument_group("model")
    model.add_argument("--model", type=Path, metavar="PATH", help="config.json, or the folder that holds it")
    model.add_argument(
        "--layers", type=count(1, MOST_LAYERS), metavar="N", help="the shape as numbers instead of --model"
    )
    for name in ("kv-lora-rank", "qk-rope-head-dim", "index-head-dim", "index-topk", "draft-layers"):
        default = ModelShape.__dataclass_fields__[name.replace("-", "_")].default
        kind = count(0 if name == "draft-layers" else 1, MOST_WIDTH)
        model.add_argument(f"--{name}", type=kind, metavar="N", help=f"with --layers (default: {default})")
    model.add_argument("--kv-dtype", choices=KV_DTYPES, default="fp8_e4m3", help="default: %(default)s")
    model.add_argument(
        "--draft-tokens", type=draft_tokens, default=0, metavar="N", help="--speculative-num-draft-tokens"
    )
    model.add_argument("--hisparse-config", metavar="JSON", help="as for the server; its ratio is worked out")
    model.add_argument("--release", metavar="R", help=f"SGLang's (default: the installed one, else {NEWEST})")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--gpu-mem",
        type=some_memory,
        required=True,
        metavar="SIZE",
        help="of one GPU before the weights are loaded, as SGLang logs it (an H200: 139)",
    )
    memory.add_argument("--weights", type=some_memory, metavar="SIZE", help="of the whole model, spread over --tp GPUs")
    memory.add_argument("--weights-per-gpu", type=some_memory, metavar="SIZE", help="instead, as SGLang's log shows it")
    memory.add_argument(
        "--reserve",
        type=any_memory,
        metavar="SIZE",
        help="kept free on a GPU for activations and CUDA graphs (default: what SGLang itself would keep)",
    )
    memory.add_argument("--host-mem", type=some_memory, required=True, metavar="SIZE", help="of a node")
    memory.add_argument(
        "--host-reserve", type=any_memory, default=64 << 30, metavar="SIZE", help="of a node, not for KV (default: 64)"
    )
    load = parser.add_argument_group("load")
    load.add_argument("--context", type=some, required=True, metavar="TOKENS", help="length of a prompt")
    load.add_argument(
        "--output",
        type=some,
        default=2048,
        metavar="TOKENS",
        help="most tokens of an answer (default: %(default)s)",
    )
    load.add_argument("--max-requests", type=some, metavar="N", help="want no more than so many at once")
    load.add_argument(
        "--hit-rates", type=rates, default=(0.5, 0.8, 0.9, 0.95, 0.99), metavar="A,B", help="to estimate swap-in for"
    )
    layout = parser.add_argument_group("parallelism")
    layout.add_argument("--tp", type=some, default=1, metavar="N", help="--tp-size: KV rows are on every rank")
    layout.add_argument("--dp", type=some, default=1, metavar="N", help="--dp-size")
    layout.add_argument("--dp-attention", action="store_true", help="--enable-dp-attention: dp within tp")
    layout.add_argument("--gpus-per-node", type=some, default=8, metavar="N", help="default: %(default)s")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--plot", type=Path, metavar="FILE", help="concurrency against context, as PNG or SVG")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: it fits; 2: it does not, or the input is wrong."""
    try:
        report = _report(options)
        if options.plot:
            picture.draw(report, options.plot)
    except SizingError as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        lines.complain("size", str(error))
        return 2
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        from ..sizing import text

        text.show(report)
        if options.plot:
            print(f"Picture: {options.plot}")
    return 0


def _report(options: argparse.Namespace) -> dict[str, Any]:
    model = _model(options)
    work = given.Workload(
        release=_release(options),
        model=model,
        hisparse=_hisparse(options.hisparse_config, model),
        kv_dtype=options.kv_dtype,
        prompt=options.context,
        output=options.output,
        draft_tokens=options.draft_tokens,
        most_requests=_most_requests(options),
    )
    machine = _machine(options)
    fit = plan.with_hisparse(work, machine)
    plain = plan.without_hisparse(work, machine)
    given_ratio = hisparse.parse(options.hisparse_config).get("host_to_device_ratio")
    return {
        "model": asdict(model),
        "release": work.release,
        "kv_dtype": work.kv_dtype,
        "prompt": work.prompt,
        "output": work.output,
        "draft_tokens": work.draft_tokens,
        "tp": options.tp,
        "dp": options.dp,
        "dp_attention": options.dp_attention,
        "machine": estimate.of_machine(work, machine, fit.requests),
        "per_token": estimate.per_token(fit.server),
        "hisparse": estimate.of_fit(fit, options.dp),
        "without": plain and estimate.of_fit(plain, options.dp),
        "flags": paste.flags(work, machine, fit),
        "swap_in": estimate.swap_in(fit, options.hit_rates),
        "contexts": estimate.by_context(work, machine, options.dp),
        "hot_buffers": estimate.by_hot_buffer(work, machine, options.dp),
        "notes": estimate.notes(work, machine, fit, given_ratio) + _weights_note(options),
    }


def _weights_note(options: argparse.Namespace) -> list[str]:
    text = (
        "with DP attention each rank loads whole attention weights, which is more than its share of --weights: "
        "SGLang's log has the figure, for --weights-per-gpu"
    )
    return [text] if options.dp_attention and options.weights is not None else []


def _hisparse(text: str | None, model: ModelShape) -> HiSparse:
    config = hisparse.parse(text)
    if unknown := hisparse.unknown(config):
        raise SizingError(
            f"--hisparse-config has a key that SGLang takes no notice of: {unknown[0]:.40}; it knows "
            f"{', '.join(hisparse.KEYS)}"
        )
    top_k = config.get("top_k", model.index_topk)
    if top_k != model.index_topk and not hisparse.faults(config):
        raise SizingError(
            f"top_k {top_k} in --hisparse-config is not the {model.index_topk} that the model's indexer selects "
            f"(index_topk): give {model.index_topk}, or leave it out"
        )
    return HiSparse.from_json(text, model.index_topk)


def _model(options: argparse.Namespace) -> ModelShape:
    numbers = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_topk", "draft_layers")
    shape = {name: value for name in numbers if (value := getattr(options, name)) is not None}
    if options.model:
        if options.layers or shape:
            raise SizingError("--model and the shape as numbers exclude each other: give one of them")
        return ModelShape.read(options.model)
    if not options.layers:
        raise SizingError(
            "no model: give --model with its config.json, or its shape as numbers, starting with --layers"
        )
    return ModelShape(layers=options.layers, **shape)


def _release(options: argparse.Namespace) -> str:
    release = options.release
    if release is None:
        try:
            release = installation.find().version
        except installation.NotInstalled:
            release = NEWEST
    if version(release) < (0, 5, 10):
        raise SizingError(f"SGLang {release} has no HiSparse: it came with 0.5.10")
    return str(release)


def _machine(options: argparse.Namespace) -> given.Machine:
    layout = Layout(options.tp, options.dp, options.dp_attention, options.gpus_per_node)
    if (options.weights is None) == (options.weights_per_gpu is None):
        raise SizingError("give --weights (of the whole model) or --weights-per-gpu, and not both")
    return given.Machine(
        gpu=options.gpu_mem,
        weights=-(-options.weights // options.tp) if options.weights_per_gpu is None else options.weights_per_gpu,
        reserve=options.reserve,
        host=options.host_mem,
        host_reserve=options.host_reserve,
        layout=layout,
    )


def _most_requests(options: argparse.Namespace) -> int:
    return min(
        given.MOST_REQUESTS, -(-options.max_requests // options.dp) if options.max_requests else given.MOST_REQUESTS
    )
