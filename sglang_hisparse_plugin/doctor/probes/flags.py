"""The launch command against SGLang, the model and the kernels: what is refused, and what would end the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...sizing import formulas, shapes
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from ..sizes import GIB, MEM_FRACTION, architecture, kv_dtype, model_shape, release, sizes
from . import gpu
from .memory import device_shortfall

KEYS = ("top_k", "device_buffer_size", "host_to_device_ratio", "swap_in_block_size")
IGNORED = ("algorithm", "backend", "min_sparse_prompt_len", "page_size")  # parsed by SGLang, not used by HiSparse
QUOTE = "write it in single quotes: --hisparse-config '{\"device_buffer_size\": 4096}'"
PAGE, MOST = 64, 1 << 24


def gather(subject: Subject) -> Facts:
    launch = subject.launch
    return {"given": launch.given, "options": dict(launch.options), "environment": dict(launch.environment)}


def judge(examined: Examined) -> Iterator[Finding]:
    launch = examined.subject.launch
    if not launch.given:
        yield note(
            "no launch command was given, so flags and memory are not judged",
            "sglang-hisparse doctor -- python -m sglang.launch_server --model-path ... (the whole command)",
        )
        return
    for problem in launch.problems:
        yield error(f"the launch command is refused: {problem}", "correct it; `... --help` lists the flags")
    if launch.get("config_file"):
        yield warning(
            f"flags in {launch.get('config_file')} (--config) are not read here",
            "repeat those that concern HiSparse, parallelism and memory after `--` for the doctor",
        )
    config, problems = _config(launch.get("hisparse_config"))
    yield from problems
    yield from _judge_server(examined)
    if not problems:
        yield from _judge_config(examined, config)
        yield from _judge_sizes(examined)


def _config(text: str | None) -> tuple[dict[str, Any], list[Finding]]:
    try:
        config = json.loads(text) if text is not None else {}
    except ValueError as reason:
        return {}, [error(f"--hisparse-config is no JSON ({reason}): {text}", QUOTE)]
    if not isinstance(config, dict):
        return {}, [error(f"--hisparse-config is no JSON object: {text}", QUOTE)]
    wrong = [
        error(f"{key} in --hisparse-config is {json.dumps(config[key])}: a whole number from 1 on is needed", QUOTE)
        for key in KEYS
        if key in config and (type(config[key]) is not int or not 1 <= config[key] <= MOST)
    ]
    return config, wrong


def _judge_config(examined: Examined, config: dict[str, Any]) -> Iterator[Finding]:
    sglang = examined.facts("sglang")
    for key in config:
        if key not in KEYS + IGNORED:
            yield warning(
                f"--hisparse-config has a key that SGLang takes no notice of: {key}", f"it knows {', '.join(KEYS)}"
            )
    block = config.get("swap_in_block_size")
    if block and sglang and not sglang["block_size"]:
        yield warning(f"swap_in_block_size does nothing in SGLang {sglang['version']}", "leave it out")
    elif block and block > 1024:
        yield error(f"swap_in_block_size {block} is refused", "give 1 to 1024; 960 is SGLang's default")
    elif block and (block < 512 or block % 32):
        yield warning(
            f"swap_in_block_size {block} makes SGLang's kernel place rows wrongly; the plugin's kernel ignores it",
            "leave it out, or give a multiple of 32 from 512 on",
        )
    buffer, top_k = config.get("device_buffer_size", 2 * config.get("top_k", 2048)), config.get("top_k", 2048)
    if config.get("host_to_device_ratio") == 1:
        yield warning(
            "host_to_device_ratio 1 keeps no more tokens on the host than on the device: HiSparse gains nothing",
            "give 2 or more, as much as host memory allows",
        )
    try:
        model = model_shape(examined)
    except shapes.SizingError as reason:
        yield from _unknown_model(examined, str(reason))
        with_model = None
    else:
        with_model = model.index_topk
        yield from _judge_top_k(examined, config, model.index_topk)
    selected = with_model if with_model and sglang.get("top_k_from_model", True) else top_k
    if buffer < selected:
        yield error(
            f"device_buffer_size {buffer} is less than top_k {selected}: one step can select that many tokens",
            f"give at least {-(-selected // PAGE) * PAGE}; {2 * selected} is SGLang's default",
        )
    elif buffer % PAGE:
        yield error(
            f"device_buffer_size {buffer} is no multiple of the page size {PAGE}: a long request ends the server",
            f"give {-(-buffer // PAGE) * PAGE}",
        )
    if buffer > shapes.MAX_DEVICE_BUFFER:
        yield error(
            f"device_buffer_size {buffer} is more than {shapes.MAX_DEVICE_BUFFER}: slots are counted in int16",
            f"give at most {shapes.MAX_DEVICE_BUFFER}",
        )


def _unknown_model(examined: Examined, reason: str) -> Iterator[Finding]:
    """A configuration that is there and whose cache cannot be sized."""
    facts, other = examined.facts("model"), examined.facts("sglang").get("architectures", {}).get("other", [])
    if "config" not in facts or facts["config"].get("index_topk") is None:
        return  # said by the model's probe
    if architecture(examined) in other or "size covers" in reason:
        yield note(f"the pools are not sized: {reason}", "watch host memory at the first start")
    else:
        yield error(
            f"the model's configuration is damaged: {reason}",
            "compare config.json with the model's page, or download it",
        )


def _judge_top_k(examined: Examined, config: dict[str, Any], index_topk: int) -> Iterator[Finding]:
    top_k, sglang = config.get("top_k", 2048), examined.facts("sglang")
    if top_k == index_topk or not sglang:
        return
    if sglang["top_k_from_model"] and "top_k" in config:
        yield warning(
            f"top_k {top_k} in --hisparse-config counts only for the default of device_buffer_size: the model's "
            f"index_topk is {index_topk}",
            f"leave top_k out, or give {index_topk}",
        )
    elif not sglang["top_k_from_model"]:
        yield error(
            f"top_k is {top_k}, but the model's indexer selects {index_topk} tokens, and SGLang "
            f"{sglang['version']} goes by the flag",
            f'give "top_k": {index_topk} in --hisparse-config',
        )


def _judge_server(examined: Examined) -> Iterator[Finding]:
    launch, sglang = examined.subject.launch, examined.facts("sglang")
    version, dtype = sglang.get("version", "?"), kv_dtype(examined)
    if not launch.get("hisparse"):
        yield warning(
            "the launch command has no --enable-hisparse: HiSparse is off, and the plugin does nothing",
            "add --enable-hisparse --disable-radix-cache",
        )
        return
    if not launch.get("disable_radix_cache"):
        yield error("SGLang refuses --enable-hisparse without --disable-radix-cache", "add --disable-radix-cache")
    if launch.get("mixed_chunk"):
        refused = sglang.get("mixed_chunk_refused")
        yield error(
            "--enable-mixed-chunk with HiSparse "
            + ("is refused" if refused else "leaks the slots of requests that finish in a mixed batch"),
            "drop --enable-mixed-chunk",
        )
    if launch.get("page_size") not in (None, PAGE):
        yield note(f"--page-size {launch.get('page_size')} is overruled: these models have pages of {PAGE}", "drop it")
    if str(launch.get("device", "cuda")) != "cuda":
        yield warning(f"--device {launch.get('device')}: the plugin's kernel is for CUDA", "use --device cuda")
    yield from _judge_dtype(examined, str(version), dtype, sglang.get("backends_by_dtype", {}))
    if launch.get("speculative"):
        yield from _judge_speculation(examined, sglang)


def _judge_dtype(examined: Examined, version: str, dtype: str, backends: dict[str, list[str]]) -> Iterator[Finding]:
    other = examined.facts("sglang").get("architectures", {}).get("other", [])
    if not backends or architecture(examined) in other:
        return
    if dtype not in backends:
        given = examined.subject.launch.get("kv_cache_dtype")
        how = f"--kv-cache-dtype {given}" if given else f"without --kv-cache-dtype this GPU gets {dtype}, which"
        yield error(
            f"{how} does not go with HiSparse in SGLang {version}", f"give --kv-cache-dtype {' or '.join(backends)}"
        )
        return
    for flag in ("prefill_backend", "decode_backend"):
        backend = examined.subject.launch.get(flag)
        if backend and backend not in backends[dtype]:
            yield error(
                f"{flag.replace('_', ' ')} {backend} does not go with HiSparse and a KV cache of {dtype}",
                f"omit the option, or give {' or '.join(backends[dtype])}",
            )


def _judge_speculation(examined: Examined, sglang: Facts) -> Iterator[Finding]:
    launch = examined.subject.launch
    if sglang and not sglang["speculative"]:
        entry = examined.facts("overlays").get("overlays", {}).get("speculative", {})
        mended = entry.get("outcome") == "applied"
        if not mended:
            yield error(
                f"SGLang {sglang['version']} has no speculative decoding with HiSparse: the draft worker dies at start",
                "drop --speculative-algorithm, or use SGLang 0.5.22 or later",
            )
    elif (launch.get("eagle_topk") or 1) != 1:
        yield error("HiSparse speculates along one line only", "give --speculative-eagle-topk 1")


def _judge_sizes(examined: Examined) -> Iterator[Finding]:
    launch, size = examined.subject.launch, sizes(examined)
    if not launch.get("hisparse"):
        return
    if size is None:
        yield from _no_room(examined)
        return
    server = size.server
    try:
        formulas.check(server)
    except shapes.SizingError as reason:
        if server.kv_dtype != "fp8_e4m3" or server.version >= (0, 5, 12):  # that was said above
            yield error(str(reason), "change the flag that is named")
    if server.row % 8 and not _kernel_is_ours(examined):
        yield error(
            f"rows of {server.row} bytes are no multiple of 8: SGLang's kernel loses their ends",
            "let the plugin's overlay swap-in be applied (`sglang-hisparse status` says why it is not)",
        )
    elif server.row % 16 and not _kernel_is_ours(examined):
        yield warning(
            f"rows of {server.row} bytes are no multiple of 16: from 0.5.11 SGLang's kernel fails on unaligned ones",
            "let the plugin's overlay swap-in be applied (`sglang-hisparse status` says why it is not)",
        )
    slots, needs = server.device_tokens, server.hisparse.padded_buffer + formulas.scratch_slots(server)
    if slots < needs:
        yield error(
            f"the device pool has {slots} slots ({size.basis}), and one decoding request takes {needs}",
            "lower device_buffer_size, or give the pool more memory (--mem-fraction-static, --max-total-tokens)",
        )
    elif (at_once := launch.get("max_running_requests")) and slots // needs * launch.count("dp") < at_once:
        yield note(
            f"--max-running-requests is {at_once}, but the device pool holds {slots // needs} hot buffers "
            f"({slots} slots: {size.basis})",
            "lower device_buffer_size to run more at once; requests beyond wait",
        )
    context = launch.get("context_length")
    if context and context > server.logical_tokens:
        yield warning(
            f"a request of --context-length {context} does not fit into the host pool's {server.logical_tokens} rows",
            "raise host_to_device_ratio, or lower --context-length",
        )
    yield from _judge_overdraft(examined)


def _kernel_is_ours(examined: Examined) -> bool:
    entry = examined.facts("overlays").get("overlays", {}).get("swap-in", {})
    return bool(entry.get("outcome") == "applied" and examined.facts("toolchain").get("nvcc"))


def _no_room(examined: Examined) -> Iterator[Finding]:
    """The weights alone are too much."""
    memory = [g["memory_mib"] / 1024 for g in gpu.used(examined) if g.get("memory_mib")]
    weights = (examined.facts("model").get("weights_bytes") or 0) / GIB
    ranks = examined.subject.launch.count("tp") * examined.subject.launch.count("pp")
    if memory and weights / ranks > min(memory) * (examined.subject.launch.get("mem_fraction") or MEM_FRACTION):
        yield error(
            f"the weights take {weights / ranks:.0f} of each GPU's {min(memory):.0f} GiB: no room for the KV cache",
            "raise --tp-size or --pp-size, or take a smaller or quantized model",
        )


def _judge_overdraft(examined: Examined) -> Iterator[Finding]:
    """To 0.5.16 SGLang's division of device memory forgets that index rows are kept for the host's tokens too."""
    size = sizes(examined)
    if size is None or size.budget_bytes is None or size.basis == "--max-total-tokens":
        return
    memory = min(g["memory_mib"] << 20 for g in gpu.used(examined) if g.get("memory_mib"))
    fraction = examined.subject.launch.get("mem_fraction") or MEM_FRACTION
    spare, over = int(memory * (1 - fraction)), device_shortfall(size)
    if over > spare:
        slots = size.server.device_tokens * size.budget_bytes // (size.budget_bytes + over) // PAGE * PAGE
        sure = size.certain and examined.subject.launch.get("mem_fraction") is not None
        yield (error if sure else warning)(
            f"SGLang {release(examined)} builds device pools {over / GIB:.1f} GiB larger than it reckons with ("
            f"tables, index rows of the host's tokens), and {spare / GIB:.1f} GiB are spare: out of memory at start",
            f"give --max-total-tokens {slots}, or lower host_to_device_ratio or --mem-fraction-static",
        )


def shown(facts: Facts) -> str:
    if not facts["given"]:
        return "none given"
    return ", ".join(f"{name}={value}" for name, value in facts["options"].items()) or "no flag that matters here"


PROBE = Probe("launch command", gather, judge, shown)
