"""GPUs, their PCIe links and their NUMA nodes, from nvidia-smi and sysfs."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import files
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from ..launch import Launch

SMI_S = 15.0
QUERY = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "capability": "compute_cap",
    "memory_mib": "memory.total",
    "used_mib": "memory.used",
    "driver": "driver_version",
    "bus": "pci.bus_id",
    "gen": "pcie.link.gen.current",
    "gen_max": "pcie.link.gen.max",
    "width": "pcie.link.width.current",
    "width_max": "pcie.link.width.max",
    "mig": "mig.mode.current",
}
NUMBERS = ("index", "memory_mib", "used_mib", "gen", "gen_max", "width", "width_max")
NVIDIA = "0x10de"
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s
GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s, one way
LEAST_CAPABILITY = (8, 0)


def gather(subject: Subject) -> Facts:
    gpus, problem = _smi(min(SMI_S, 0.75 * (subject.time_limit_s or SMI_S)))
    if not gpus:
        gpus = _from_sysfs(subject.root)
    for gpu in gpus:
        link = read_link(subject.root, gpu["bus"])
        gpu.update({name: value for name, value in link.items() if value is not None})
    return {
        "gpus": gpus,
        "smi_problem": problem,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nodes": _nodes(subject.root),
        "cpus": sorted(os.sched_getaffinity(0)),
    }


def _smi(seconds: float) -> tuple[list[dict[str, Any]], str]:
    """GPUs as nvidia-smi tells, and why it does not."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace", check=False)
    except FileNotFoundError:
        return [], "is not on PATH"
    except OSError as error:
        return [], f"does not run: {error}"
    except subprocess.TimeoutExpired:
        return [], f"gives no answer in {seconds:g} s"
    if ended.returncode:
        said = " ".join((ended.stdout or ended.stderr).split())
        return [], f"fails with code {ended.returncode}: {said[:300]}"
    rows = csv.reader(ended.stdout.splitlines(), skipinitialspace=True)
    gpus = [
        {key: _value(key, text) for key, text in zip(QUERY, row, strict=True)} for row in rows if len(row) == len(QUERY)
    ]
    return [gpu for gpu in gpus if gpu["index"] is not None], "" if gpus else "lists no GPU"


def _value(key: str, text: str) -> Any:
    """As the probes want it; None for what nvidia-smi does not tell: [N/A], [Not Supported]."""
    text = text.strip()
    if key in NUMBERS:
        return int(text) if text.isdigit() else None
    if key == "capability":
        return text if re.fullmatch(r"\d+\.\d+", text) else None
    if key == "bus":
        return _bus(text)
    return None if text.startswith("[") or text == "N/A" else text


def _bus(text: str) -> str:
    """``00000000:1B:00.0`` as sysfs spells it."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _from_sysfs(root: Path) -> list[dict[str, Any]]:
    """NVIDIA's display and compute devices, with the name that the driver gives them if it runs."""
    gpus: list[dict[str, Any]] = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        if _line(device / "vendor") == NVIDIA and str(_line(device / "class")).startswith("0x03"):
            told = files.text(root / "proc/driver/nvidia/gpus" / device.name / "information")
            name = re.search(r"Model:\s*(.+)", told)
            gpus.append({"index": len(gpus), "bus": device.name, "name": name[1].strip() if name else None})
    return gpus


def read_link(root: Path, bus: str) -> dict[str, Any]:
    """PCIe link and NUMA node of a device; None for what sysfs does not tell. Power saving lowers the generation."""
    device = root / "sys/bus/pci/devices" / bus
    node = _line(device / "numa_node")
    return {
        "gen": _generation(_line(device / "current_link_speed")),
        "gen_max": _generation(_line(device / "max_link_speed")),
        "width": _lanes(_line(device / "current_link_width")),
        "width_max": _lanes(_line(device / "max_link_width")),
        "node": int(node) if node and node.isdigit() else None,  # -1: the firmware does not tell
    }


def _generation(text: str | None) -> int | None:
    match = re.match(r"(\d+(?:\.\d+)?)\s*GT/s", text or "")
    return GENERATIONS.get(float(match[1])) if match else None


def _lanes(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and 0 < int(text) <= 32 else None


def _nodes(root: Path) -> dict[str, dict[str, Any]]:
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        told = files.text(folder / "meminfo")
        free, total = (re.search(rf"{key}:\s*(\d+) kB", told) for key in ("MemFree", "MemTotal"))
        nodes[folder.name[4:]] = {
            "cpus": _line(folder / "cpulist") or "",
            "free_bytes": int(free[1]) * 1024 if free else None,
            "total_bytes": int(total[1]) * 1024 if total else None,
        }
    return nodes


def _line(path: Path) -> str | None:
    return files.text(path).strip() or None


def cpu_set(text: str) -> set[int]:
    """``0-3,8`` as numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def needed(launch: Launch) -> int:
    """GPUs that the launch command takes on this host."""
    return max(1, launch.count("tp") * launch.count("pp_size") * launch.replicas // launch.count("nnodes"))


def visible(facts: Facts) -> list[dict[str, Any]]:
    """The GPUs that CUDA would show, in its order."""
    gpus: list[dict[str, Any]] = facts.get("gpus", [])
    if facts.get("visible") is None:
        return gpus
    if "MIG-" in str(facts["visible"]):  # instances are not told apart
        return gpus
    chosen = []
    for word in str(facts["visible"]).split(","):
        name = word.strip()
        match = [g for g in gpus if str(g["index"]) == name or (g.get("uuid") or "").startswith(name or " ")]
        if not match:
            break  # CUDA takes no notice of what comes after an unknown one
        chosen.append(match[0])
    return chosen


def used(examined: Examined) -> list[dict[str, Any]]:
    """The GPUs that the launch command would run on."""
    launch = examined.subject.launch
    first, step = launch.get("base_gpu_id", 0), launch.count("gpu_id_step")
    return visible(examined.facts("gpu"))[max(0, first) :: step][: needed(launch)]


def judge(examined: Examined) -> Iterator[Finding]:
    facts, launch = examined.facts("gpu"), examined.subject.launch
    problem = facts["smi_problem"]
    if not facts["gpus"]:
        if examined.facts("torch").get("hip"):
            return  # AMD's: said by torch's probe
        yield error(
            f"there is no NVIDIA GPU here (nvidia-smi {problem})",
            "run on the GPU host; in a container, start it with --gpus all; else install the NVIDIA driver",
        )
        return
    if problem:
        yield warning(
            f"nvidia-smi {problem}; memory and compute capability of the GPU are not known",
            "put nvidia-smi on PATH (SGLang's JIT asks it, too); if it hangs, look for driver errors in `dmesg`",
        )
    count = len(used(examined))
    if count < needed(launch):
        shown = f"CUDA_VISIBLE_DEVICES={facts['visible']} shows" if facts["visible"] is not None else "there are"
        yield error(
            f"the launch command takes {needed(launch)} GPUs of this host from --base-gpu-id on, {shown} "
            f"{len(visible(facts))} and {count} of them fit",
            "lower --tp-size, --dp-size or --pp-size, set --nnodes, or make more GPUs visible",
        )
    for gpu in used(examined):
        yield from _judge_gpu(gpu)
    yield from _judge_nodes(examined, facts)


def _judge_gpu(gpu: dict[str, Any]) -> Iterator[Finding]:
    name = f"GPU {gpu['index']} ({gpu.get('name') or 'unnamed'})"
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(gpu.get("capability") or ""))
    if capability and (int(capability[1]), int(capability[2])) < LEAST_CAPABILITY:
        yield error(
            f"{name} has compute capability {gpu['capability']}; SGLang's sparse attention needs 8.0, in practice 9.0",
            "use a Hopper or Blackwell GPU (H100, H200, B200)",
        )
    elif capability and int(capability[1]) < 9:
        yield warning(
            f"{name} has compute capability {gpu['capability']}; FlashMLA's sparse attention is for 9.0 and later",
            "use a Hopper or Blackwell GPU, or check that your release has a DSA backend for this one",
        )
    if gpu.get("mig") == "Enabled":
        yield note(
            f"{name} is partitioned (MIG): its instances are not told apart here", "judge memory by the instance"
        )
    width, width_max = gpu.get("width"), gpu.get("width_max")
    if width and width_max and width < width_max:
        yield warning(
            f"{name} runs on {width} of {width_max} PCIe lanes, so swap-in has {width / width_max:.0%} of the link",
            "reseat the card or riser, use another slot, or look at the BIOS's bifurcation",
        )
    if (total := gpu.get("memory_mib")) and (gpu.get("used_mib") or 0) > 0.05 * total:
        yield warning(
            f"{gpu['used_mib'] / 1024:.0f} of {total / 1024:.0f} GiB of {name} are in use already",
            "end what runs there (`nvidia-smi` lists it): SGLang sizes its pools by what is free",
        )


def _judge_nodes(examined: Examined, facts: Facts) -> Iterator[Finding]:
    """Host rows on another socket cross its link at every miss."""
    homes = {gpu["node"] for gpu in used(examined) if gpu.get("node") is not None}
    if len(facts["nodes"]) < 2 or not homes or examined.subject.launch.get("numa_node"):
        return
    mine = set(facts["cpus"])
    near = {int(n) for n, node in facts["nodes"].items() if cpu_set(node["cpus"]) & mine}
    listed = ",".join(map(str, sorted(homes)))
    bind = (
        f"start the server with numactl --cpunodebind={listed} --membind={listed}"
        if len(homes) == 1
        else "give SGLang --numa-node, one node for each GPU in order"
    )
    if not homes & near:
        yield warning(f"the GPUs are on NUMA node {listed}, this process may only run on {sorted(near)}", bind)
    elif near - homes or len(homes) > 1:
        yield note(f"the GPUs are on NUMA node {listed}; unbound, host memory may come from {sorted(near)}", bind)


def shown(facts: Facts) -> str:
    return "; ".join(map(_described, facts["gpus"])) or "none"


def _described(gpu: dict[str, Any]) -> str:
    parts = [f"{gpu['index']}: {gpu.get('name') or 'NVIDIA device'}"]
    if gpu.get("capability"):
        parts.append(f"sm_{str(gpu['capability']).replace('.', '')}")
    if gpu.get("memory_mib"):
        parts.append(f"{gpu['memory_mib'] / 1024:.0f} GiB")
    if gpu.get("gen_max") and gpu.get("width"):
        parts.append(f"PCIe {gpu['gen_max']} x{gpu['width']} (now at generation {gpu.get('gen')})")
    if gpu.get("node") is not None:
        parts.append(f"NUMA node {gpu['node']}")
    if gpu.get("driver"):
        parts.append(f"driver {gpu['driver']}")
    return ", ".join(parts)


PROBE = Probe("gpu", gather, judge, shown, limit_s=20)
