"""``--hisparse-config`` against SGLang, the model and the kernels; judged with the rest of the launch command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...sizing import hisparse, shapes
from ..examine import Examined
from ..finding import Finding, error, note, warning
from ..sizes import architecture, model_shape

PAGE = 64


def faults(examined: Examined) -> dict[str, str]:
    """Why the flag's value cannot be read, and the remedy of each."""
    try:
        return hisparse.faults(hisparse.parse(examined.subject.launch.get("hisparse_config")))
    except shapes.SizingError as reason:
        return {str(reason): hisparse.QUOTE}


def judge(examined: Examined) -> Iterator[Finding]:
    found = faults(examined)
    yield from (error(fault, remedy) for fault, remedy in found.items())
    if not found:
        yield from _judge_config(examined, hisparse.parse(examined.subject.launch.get("hisparse_config")))


def _judge_config(examined: Examined, config: dict[str, Any]) -> Iterator[Finding]:
    sglang = examined.facts("sglang")
    for key in hisparse.unknown(config):
        yield warning(
            f"--hisparse-config has a key that SGLang takes no notice of: {key:.40}",
            f"it knows {', '.join(hisparse.KEYS)}",
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
    if buffer > hisparse.MAX_DEVICE_BUFFER:
        yield error(
            f"device_buffer_size {buffer} is more than {hisparse.MAX_DEVICE_BUFFER}: slots are counted in int16",
            f"give at most {hisparse.MAX_DEVICE_BUFFER}",
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
