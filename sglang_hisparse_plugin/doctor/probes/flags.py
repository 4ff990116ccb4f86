"""The launch command against SGLang, the model and the kernels: what is refused, and what would end the server."""

from __future__ import annotations

from collections.abc import Iterator

from ... import refusals
from ...sizing import formulas, shapes
from ...sizing.layout import Layout
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from ..launch import Launch
from ..sizes import GIB, MEM_FRACTION, architecture, kv_dtype, model_shape, release, server, sizes
from . import flag_value, gpu, overlays, speculation
from .memory import device_shortfall

PAGE = 64


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
    yield from flag_value.judge(examined)
    yield from _judge_server(examined)
    yield from speculation.judge(examined)
    if not flag_value.faults(examined):
        yield from _judge_sizes(examined)


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
    if launch.get("hierarchical_cache"):
        yield error(
            "SGLang refuses --enable-hierarchical-cache together with --disable-radix-cache, which HiSparse needs",
            "drop --enable-hierarchical-cache",
        )
    if launch.get("enable_mixed_chunk"):
        yield _mixed_chunk(examined)
    for problem in refusals.problems(launch.arguments, lambda: bool(sglang.get("takes_tokens"))):
        yield error(f"refused, for {problem.what}", problem.remedy)
    yield from _judge_layout(examined)
    if launch.get("page_size") not in (None, PAGE):
        yield note(f"--page-size {launch.get('page_size')} is overruled: these models have pages of {PAGE}", "drop it")
    if str(launch.get("device", "cuda")) != "cuda":
        yield warning(f"--device {launch.get('device')}: the plugin's kernel is for CUDA", "use --device cuda")
    yield from _judge_dtype(examined, str(version), dtype, sglang.get("backends_by_dtype", {}))


def _mixed_chunk(examined: Examined) -> Finding:
    if examined.facts("sglang").get("mixed_chunk_refused"):
        return error("SGLang refuses --enable-mixed-chunk with HiSparse", "drop --enable-mixed-chunk")
    if overlays.applied(examined, "mixed-chunk"):
        return note(
            "--enable-mixed-chunk is left out of account by the plugin's overlay mixed-chunk: HiSparse cannot mix",
            "drop --enable-mixed-chunk",
        )
    return error(
        "--enable-mixed-chunk with HiSparse ends the server when a prompt arrives while others decode",
        "drop --enable-mixed-chunk, or let the plugin's overlay mixed-chunk be applied",
    )


def _judge_layout(examined: Examined) -> Iterator[Finding]:
    """How ranks are spread over data parallelism and nodes, and attention heads over ranks."""
    launch = examined.subject.launch
    tp, dp, ranks = launch.count("tp"), launch.count("dp"), launch.attention_ranks
    attention = ranks > 1
    if launch.count("attn_dp_size") > 1 and dp > 1:
        yield error(
            f"SGLang refuses --dp-size {dp} with --attn-dp-size {launch.get('attn_dp_size')}", "give one of them"
        )
    if launch.get("dp_attention") and not attention:
        yield warning(
            "--enable-dp-attention without --dp-size: SGLang turns it off",
            (f"give --dp-size, a divisor of --tp-size {tp}, or " if tp > 1 else "") + "drop --enable-dp-attention",
        )
    if (nodes := launch.count("nnodes")) > 1 and dp > 1 and not attention:
        yield error(
            f"SGLang refuses --dp-size {dp} on {nodes} nodes without --enable-dp-attention",
            "add --enable-dp-attention, or start a server on each node",
        )
    if (stages := tp * launch.count("pp_size")) % nodes:
        yield error(f"--nnodes {nodes} does not divide the {stages} ranks", "give a --tp-size that it divides")
    try:
        model = model_shape(examined)
    except shapes.SizingError:
        model = None  # said elsewhere
    try:
        spread = Layout(tp, ranks if attention else dp, attention, gpus_per_node=tp * dp)
        if model:
            spread.check(model)
    except shapes.SizingError as reason:
        yield error(str(reason).replace(" --dp-attention", " --enable-dp-attention"), "change the flag that is named")


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


def _judge_sizes(examined: Examined) -> Iterator[Finding]:
    launch, size = examined.subject.launch, sizes(examined)
    if not launch.get("hisparse"):
        return
    yield from _judge_combination(examined)
    if size is None:
        yield from _no_room(examined)
        return
    rank = size.server
    if rank.row % 8 and not _kernel_is_ours(examined):
        yield error(
            f"rows of {rank.row} bytes are no multiple of 8: SGLang's kernel loses their ends",
            "let the plugin's overlay swap-in be applied (`sglang-hisparse status` says why it is not)",
        )
    elif rank.row % 16 and not _kernel_is_ours(examined):
        yield warning(
            f"rows of {rank.row} bytes are no multiple of 16: from 0.5.11 SGLang's kernel fails on unaligned ones",
            "let the plugin's overlay swap-in be applied (`sglang-hisparse status` says why it is not)",
        )
    slots, needs = rank.device_tokens, rank.hisparse.padded_buffer + formulas.scratch_slots(rank)
    if slots < needs:
        yield error(
            f"the device pool has {slots} slots ({size.basis}), and one decoding request takes {needs}",
            "lower device_buffer_size, or give the pool more memory (--mem-fraction-static, --max-total-tokens)",
        )
    elif speculation.by_plugin(examined):
        pass  # each of them must have its buffer, which is judged there
    elif (at_once := launch.get("max_running_requests")) and slots // needs * launch.attention_ranks < at_once:
        yield note(
            f"--max-running-requests is {at_once}, but the device pool holds {slots // needs} hot buffers "
            f"({slots} slots: {size.basis})",
            "lower device_buffer_size to run more at once; requests beyond wait",
        )
    context = launch.get("context_length")
    if context and context > rank.logical_tokens:
        yield warning(
            f"a request of --context-length {context} does not fit into the host pool's {rank.logical_tokens} rows",
            "raise host_to_device_ratio, or lower --context-length",
        )
    yield from _judge_overdraft(examined)


def _judge_combination(examined: Examined) -> Iterator[Finding]:
    if (rank := server(examined)) is None or (rank.kv_dtype == "fp8_e4m3" and rank.version < (0, 5, 12)):
        return  # that was said above
    try:
        formulas.check(rank)
    except shapes.SizingError as reason:
        yield error(str(reason), "change the flag that is named")


def _kernel_is_ours(examined: Examined) -> bool:
    return bool(overlays.applied(examined, "swap-in") and examined.facts("toolchain").get("nvcc"))


def _no_room(examined: Examined) -> Iterator[Finding]:
    """The weights alone are too much."""
    memory = [g["memory_mib"] / 1024 for g in gpu.used(examined) if g.get("memory_mib")]
    weights = (examined.facts("model").get("weights_bytes") or 0) / GIB
    ranks = examined.subject.launch.count("tp") * examined.subject.launch.count("pp_size")
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
    return Launch(options=facts["options"]).spelled() or "no flag that matters here"


PROBE = Probe("launch command", gather, judge, shown)
