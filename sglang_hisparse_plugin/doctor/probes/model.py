"""The model's configuration, found as SGLang would find it but without a network, and how much its weights take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...sizing import shapes
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from ..sizes import architecture

KEPT = (
    *("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "index_topk", "index_head_dim", "index_n_heads"),
    *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset", "indexer_types", "index_kpool", "cli_factor"),
    *("num_nextn_predict_layers", "max_position_embeddings", "compress_ratios", "sparse_attention_config"),
    *("torch_dtype", "dtype", "num_attention_heads", "rope_scaling"),
)
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def gather(subject: Subject) -> Facts:
    name = subject.launch.get("model")
    if not name:
        return {"name": None}
    folder, problem = _folder(str(name), subject.launch.get("revision") or "main")
    if folder is None:
        return {"name": name, "problem": problem, "local": _is_path(str(name))}
    facts: Facts = {"name": name, "folder": str(folder)}
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it holds no JSON object")
        config = {**config, **_overrides(subject)}
        text = config.get("text_config")
        merged = {**config, **(text if isinstance(text, dict) else {})}
        facts["architectures"] = config.get("architectures")
        facts["config"] = {key: merged[key] for key in KEPT if key in merged}
    except (OSError, ValueError, RecursionError) as reason:
        return {**facts, "broken": f"{folder / 'config.json'}: {reason}"}
    longer = os.environ.get(LONGER, "").lower() in ("true", "1", "yes", "y")
    return {**facts, "longer_context": longer, **_weights(folder)}


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or os.path.isdir(name)


def _folder(name: str, revision: str) -> tuple[Path | None, str]:
    """The folder of a model's files, or why there is none."""
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):  # unlike the path's own methods, answers for names that are too long, too
        return None, f"{path} is a file, and a model is a folder: give {path.parent}"
    if os.path.isdir(path):
        return (path, "") if (path / "config.json").exists() else (None, f"{path} has no config.json")
    if _is_path(name):
        return None, f"{path} does not exist"
    hub = _hub() / f"models--{name.replace('/', '--')}"
    snapshots = hub / "snapshots"
    try:
        commit = (hub / "refs" / revision).read_text("ascii").strip()
    except (OSError, ValueError):
        commit = revision
    if os.path.isfile(snapshots / commit / "config.json"):
        return snapshots / commit, ""
    return None, f"{name} is not in the local Hugging Face cache ({hub})"


def _hub() -> Path:
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / below
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "huggingface" / "hub"


def _overrides(subject: Subject) -> dict[str, Any]:
    text = subject.launch.get("overrides")
    values = json.loads(text) if text else {}
    if not isinstance(values, dict):
        raise ValueError("--json-model-override-args is no JSON object")
    return values


def _weights(folder: Path) -> Facts:
    """Bytes of the weights that are there, and the names of those that the index names and that are not."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors") if path.exists()}
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        named = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        named = set()
    missing = sorted(str(name) for name in named - sizes.keys())
    return {
        "weights_bytes": 0 if missing else sum(sizes.values()),
        "missing": len(missing),
        "first_missing": missing[:1],
    }


def judge(examined: Examined) -> Iterator[Finding]:
    facts, launch = examined.facts("model"), examined.subject.launch
    if not facts["name"]:
        yield note(
            "no model was given, so its configuration and the memory it takes are not judged",
            "sglang-hisparse doctor -- <your launch command>, or --model PATH",
        )
        return
    if problem := facts.get("problem"):
        if facts["local"] or os.environ.get("HF_HUB_OFFLINE") == "1":
            yield error(f"no model: {problem}", "correct --model-path, or download the model there")
        else:
            yield note(
                f"the model is not judged: {problem}",
                f"huggingface-cli download {facts['name']} config.json, or give --model a folder that has it",
            )
        return
    if broken := facts.get("broken"):
        yield error(
            f"the model's configuration cannot be read: {broken}",
            "download config.json again; check --json-model-override-args",
        )
        return
    if facts["missing"]:
        yield warning(
            f"{facts['missing']} weight files that the index names are not in {facts['folder']} "
            f"({facts['first_missing'][0]} ...)",
            "finish the download, or serve with --load-format dummy",
        )
    yield from _judge_architecture(examined, facts)
    try:
        most = shapes.longest(facts["config"])
    except ValueError:
        most = None  # damaged, which the launch command's probe says
    context = launch.get("context_length")
    if context and most and context > most:
        allowed = facts.get("longer_context")
        yield (warning if allowed else error)(
            f"--context-length {context} is beyond the {most} tokens that the model's configuration allows"
            + (f"; {LONGER} is set, so it is served" if allowed else ", and SGLang refuses it"),
            f"lower it to {most}" + ("" if allowed else f"; {LONGER}=1 makes SGLang take it, at the risk of bad text"),
        )


def _judge_architecture(examined: Examined, facts: Facts) -> Iterator[Finding]:
    known, name = examined.facts("sglang").get("architectures"), architecture(examined)
    if not name:
        yield error(
            f"config.json names no architecture: {facts['architectures']!r}",
            'restore "architectures" in config.json, as ["DeepseekV32ForCausalLM"]',
        )
        return
    if not known or not known["dsa"] or name in known["other"]:
        return
    if name not in known["dsa"]:
        yield error(
            f"{name} is not one of the architectures for which this SGLang takes --enable-hisparse",
            "serve it without --enable-hisparse, or use a newer SGLang; this one takes "
            + ", ".join(known["dsa"] + known["other"]),
        )
    elif facts["config"].get("index_topk") is None:
        yield error(
            f"config.json of {name} has no index_topk: to SGLang it has no sparse attention",
            "take the configuration of a model with DeepSeek Sparse Attention, or drop --enable-hisparse",
        )


def shown(facts: Facts) -> str:
    if not facts["name"]:
        return "none given"
    if "config" not in facts:
        return str(facts.get("problem") or facts.get("broken"))
    weights = (
        f"{facts['weights_bytes'] / (1 << 30):.1f} GiB of weights" if facts["weights_bytes"] else "weights not here"
    )
    names = facts["architectures"]
    return f"{facts['name']}: {', '.join(map(str, names)) if isinstance(names, list) else names}, {weights}"


PROBE = Probe("model", gather, judge, shown)
