"""The packages that must import before a server can start. Each is imported in its own process, and may die there."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning

LIMIT_S = 120.0  # torch and SGLang from a slow disk


def _gather(module: str, distributions: tuple[str, ...], subject: Subject) -> Facts:
    if subject.sglang_path:
        sys.path.insert(0, str(subject.sglang_path))
    if module == "sgl_kernel" and importlib.util.find_spec(module) is None:
        return {"module": module, "missing": True}
    imported = importlib.import_module(module)
    version = getattr(imported, "__version__", None)
    for name in () if version else distributions:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    more = _torch(imported) if module == "torch" else {}
    return {"module": module, "version": str(version or "unknown"), "path": getattr(imported, "__file__", None), **more}


def _torch(torch: Any) -> Facts:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = {
            "cuda": torch.version.cuda,
            "hip": getattr(torch.version, "hip", None),
            "available": bool(torch.cuda.is_available()),
            "devices": torch.cuda.device_count(),
            "architectures": list(torch.cuda.get_arch_list()),
        }
    return {**facts, "warnings": [str(w.message).strip() for w in caught][:3]}


def _judge_torch(examined: Examined) -> Iterator[Finding]:
    facts, gpus = examined.facts("torch"), examined.facts("gpu").get("gpus", [])
    if facts["hip"]:
        yield warning(
            "this torch is for ROCm: SGLang's own swap-in serves there, the plugin's kernel needs CUDA",
            "expect the repairs, and SGLang's own speed; on NVIDIA install the CUDA build of torch",
        )
    elif gpus and not facts["cuda"]:
        yield error(
            f"torch {facts['version']} is a build without CUDA, though there is a GPU",
            "install the CUDA build that SGLang pins: pip install --force-reinstall torch==VERSION",
        )
    elif gpus and not facts["available"]:
        why = facts["warnings"][0] if facts["warnings"] else "torch.cuda.is_available() is False"
        yield error(
            f"torch {facts['version']} (CUDA {facts['cuda']}) cannot use the GPU: {why}",
            "update the NVIDIA driver, or take a torch for the driver's CUDA; start a container with --gpus all; "
            "check that CUDA_VISIBLE_DEVICES names a GPU",
        )
    elif facts["architectures"]:
        missing = {g["capability"] for g in gpus if g.get("capability") and not _covers(facts, g["capability"])}
        for capability in sorted(missing):
            yield error(
                f"torch {facts['version']} has no code for compute capability {capability}, only for "
                + ", ".join(facts["architectures"]),
                "install a torch build for this GPU, one for a newer CUDA",
            )


def _covers(facts: Facts, capability: str) -> bool:
    """Code for the same major and no newer minor runs; so does PTX of anything older."""
    major, _, minor = capability.partition(".")
    for name in facts["architectures"]:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit() or not minor.isdigit():
            return True
        have = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and have[0] == int(major) and have[1] <= int(minor):
            return True
        if kind == "compute" and have <= (int(major), int(minor)):
            return True
    return False


def _none(_examined: Examined) -> Iterator[Finding]:
    yield from ()


def _judge_kernel(examined: Examined) -> Iterator[Finding]:
    if examined.facts("sgl_kernel").get("missing") and examined.facts("sglang") and examined.facts("gpu").get("gpus"):
        yield error(
            "SGLang's compiled kernels (package sgl_kernel) are not installed",
            "pip install sglang-kernel (sgl-kernel for releases before 0.5.10), in the version that SGLang pins",
        )


def _failed(name: str, module: str, install: str, examined: Examined, failure: str) -> Iterator[Finding]:
    absent = f"No module named '{module}'"
    if module == "sglang" and not examined.facts("sglang"):
        return  # said by the probe that looked for it
    if module == "sgl_kernel":
        torch_fails = bool(examined.failure("torch"))
        if torch_fails or not examined.facts("gpu").get("gpus"):
            what = "torch does not import" if torch_fails else "there is no GPU"
            yield note(f"sgl_kernel does not import, which says nothing while {what}: {_short(failure)}", "see there")
            return
    if failure.startswith("ModuleNotFoundError") and absent in failure:
        yield error(f"{module} is not installed", f"pip install {install}")
        return
    printed = examined.outcomes[name].output.splitlines()
    last = f"; it printed: {_short(printed[-1])}" if printed else ""
    remedy = f"see the whole message with {sys.executable} -c 'import {module}'; then reinstall: pip install {install}"
    if failure.startswith("no answer"):
        remedy = "look at the disk and the GPU driver it waits for; --time-limit sets how long the doctor waits"
    yield error(f"{module} does not import: {_short(failure)}{last}", remedy)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."


def _shown(facts: Facts) -> str:
    if facts.get("missing"):
        return "not installed"
    cuda = f", CUDA {facts['cuda'] or 'none: a CPU build'}" if "cuda" in facts else ""
    return f"{facts['version']}{cuda} ({facts['path'] or 'built in'})"


def _probe(module: str, distributions: tuple[str, ...], install: str, name: str = "") -> Probe:
    name = name or module
    return Probe(
        name,
        partial(_gather, module, distributions),
        JUDGES.get(module, _none),
        _shown,
        LIMIT_S,
        partial(_failed, name, module, install),
    )


JUDGES = {"torch": _judge_torch, "sgl_kernel": _judge_kernel}
PROBES = (
    _probe("torch", ("torch",), "torch, in the version that SGLang pins"),
    _probe("sglang", ("sglang",), "sglang", name="import sglang"),
    _probe("sgl_kernel", ("sglang-kernel", "sgl-kernel"), "sglang-kernel, as SGLang pins it"),
    _probe("tvm_ffi", ("apache-tvm-ffi",), "apache-tvm-ffi; SGLang compiles its kernels with it"),
)
