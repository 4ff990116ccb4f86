"""SGLang as it lies on disk: which one, what it requires, what its HiSparse accepts. Nothing of it is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ... import installation, refusals, upstream
from ...patching.source import SourceTree
from .. import files
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, warning

REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;.*)?$")
#: Of the packages that SGLang pins, those whose version decides whether kernels load.
DECISIVE = ("torch", "sglang-kernel", "sgl-kernel", "apache-tvm-ffi")
MOST_NAMED = 6
MODEL_CONFIG = "sglang.srt.configs.model_config"
HISPARSE_HOOK = "sglang/srt/arg_groups/hisparse_hook.py"


def gather(subject: Subject) -> Facts:
    # The .pth file's watcher would open the plugin's door at this look-up.
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "watches", "") != "sglang"]
    sglang = installation.find(subject.sglang_path)
    tree, root = sglang.tree, sglang.root
    hook = files.text(root / HISPARSE_HOOK)
    distribution = _distribution(root)
    return {
        "version": distribution.version if distribution else "unknown",
        "root": str(root),
        "has_loader": sglang.has_loader,
        "has_hisparse": upstream.has_hisparse(tree),
        "lacks_hisparse": upstream.lacks_hisparse(tree),
        "requires_python": str((distribution.metadata["Requires-Python"] or "") if distribution else ""),
        "unmet": _unmet(distribution.requires or []) if distribution else [],
        "architectures": {
            "dsa": _strings(tree, "is_deepseek_dsa", "is_deepseek_nsa"),
            "other": _strings(tree, *(n for n in ("is_deepseek_v4", "is_minimax_sparse") if n in hook)),
        },
        "draft_architectures": _strings(tree, "ModelConfig._config_draft_model"),
        "backends_by_dtype": _backends(hook) or {"bfloat16": ["flashmla_sparse"]},
        # The coordinator takes the model's index_topk from 0.5.12, --hisparse-config's top_k before.
        "top_k_from_model": "hisparse_top_k" in files.text(root / "sglang/srt/model_executor/model_runner.py"),
        "mixed_chunk_refused": "enable_mixed_chunk" in hook,
        "takes_tokens": refusals.takes_tokens(tree),
        "speculative": "HiSparseSpecSwapManager" in files.text(root / "sglang/srt/managers/hisparse_coordinator.py"),
        "block_size": "swap_in_block_size" in files.text(root / "sglang/srt/mem_cache/sparsity/factory.py"),
    }


def _strings(tree: SourceTree, *names: str) -> list[str]:
    """String constants in these functions, where they exist, that look like names of architectures."""
    found = [f for name in names if (f := tree.function(MODEL_CONFIG, name))]
    texts = [n.value for f in found for n in ast.walk(f.node) if isinstance(n, ast.Constant)]
    return sorted({text for text in texts if isinstance(text, str) and re.fullmatch(r"[A-Z]\w+", text)})


def _backends(hook: str) -> dict[str, list[str]]:
    """Attention backends that HiSparse takes on CUDA by KV dtype, from the table in SGLang's own check."""
    try:
        body = ast.parse(hook).body
    except (SyntaxError, ValueError):
        return {}
    for node in body:
        if isinstance(node, ast.Assign) and "BACKENDS_BY_DTYPE" in ast.unparse(node.targets[0]):
            try:
                return {str(dtype): sorted(names) for dtype, names in ast.literal_eval(node.value).items()}
            except (ValueError, TypeError, AttributeError):
                return {}
    return {}


def _distribution(root: Path) -> importlib.metadata.Distribution | None:
    found = importlib.metadata.distributions(path=[str(root)])
    return next((d for d in found if name_of(d) == "sglang"), None)


def name_of(distribution: importlib.metadata.Distribution) -> str:
    """Normalized; empty for one whose metadata are damaged."""
    try:
        return (distribution.metadata["Name"] or "").lower().replace("_", "-")
    except Exception:  # the reader of metadata raises what it likes
        return ""


def _unmet(requirements: Iterable[str]) -> list[dict[str, Any]]:
    """Requirements without a marker that are missing, or pinned to another version than the one installed."""
    unmet = []
    for line in requirements:
        match = None if ";" in line else REQUIREMENT.match(line)
        if not match:
            continue
        name, wanted = match[1], match[2].strip()
        try:
            installed: str | None = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        pin = wanted[2:].strip() if wanted.startswith("==") and "," not in wanted and "*" not in wanted else None
        if installed is None or (pin and installed.partition("+")[0] != pin.partition("+")[0]):
            unmet.append({"name": name, "wanted": wanted, "installed": installed})
    return unmet


def judge(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts("sglang")
    if facts["lacks_hisparse"]:
        yield error(
            f"SGLang {facts['version']} has no HiSparse", "install SGLang 0.5.10 or later: pip install 'sglang>=0.5.10'"
        )
    elif not facts["has_hisparse"]:
        yield warning(
            f"SGLang {facts['version']} has no HiSparseCoordinator where it is known to be; the plugin stays out of it",
            "use a release from the support matrix, or a newer plugin",
        )
    if minimum := re.search(r">=\s*(\d+)\.(\d+)", facts["requires_python"]):
        needed = (int(minimum[1]), int(minimum[2]))
        running = tuple(int(part) for part in platform.python_version_tuple()[:2])
        if running < needed:
            yield error(
                f"SGLang {facts['version']} needs Python {facts['requires_python']}, not {platform.python_version()}",
                f"make the environment with Python {minimum[1]}.{minimum[2]} or later",
            )
    unmet = {entry["name"]: entry for entry in facts["unmet"]}
    decisive = {name: entry for name, entry in unmet.items() if name.lower() in DECISIVE}
    for group in (decisive, {name: entry for name, entry in unmet.items() if name not in decisive}):
        if group:
            yield warning(
                f"SGLang {facts['version']} asks for {_listed(list(group.values()))}",
                f"pip install sglang=={facts['version']}, which brings what it asks for"
                if facts["version"] != "unknown"
                else "install what this SGLang's pyproject.toml names",
            )


def _listed(entries: list[dict[str, Any]]) -> str:
    more = f" and {len(entries) - MOST_NAMED} more" if len(entries) > MOST_NAMED else ""
    return ", ".join(map(_described, entries[:MOST_NAMED])) + more


def _described(entry: dict[str, Any]) -> str:
    has = f"has {entry['installed']}" if entry["installed"] else "not installed"
    return f"{entry['name']}{entry['wanted']} ({has})"


def failed(examined: Examined, failure: str) -> Iterator[Finding]:
    if failure.startswith("NotInstalled: "):
        what = failure.removeprefix("NotInstalled: ")
        yield error(what, "pip install 'sglang-hisparse-plugin[sglang]', or run the doctor in SGLang's environment")
    else:
        yield error(
            f"SGLang's files cannot be read: {failure}", "reinstall it: pip install --force-reinstall --no-deps sglang"
        )


def shown(facts: Facts) -> str:
    way = "loads plugins itself" if facts["has_loader"] else "has no plugin loader: the .pth file activates"
    return f"{facts['version']} in {facts['root']}; {way}"


PROBE = Probe("sglang", gather, judge, shown, limit_s=30, failed=failed)
