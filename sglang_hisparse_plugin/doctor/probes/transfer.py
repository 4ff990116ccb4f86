"""The host-to-device rate: what a miss costs. Memory is pinned the way SGLang pins its host pool."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, warning
from .gpu import GB_PER_LANE, needed, read_link, visible

BYTES = 256 * 1000 * 1000
ENOUGH_S = 2.0  # of copying, over all devices
LEAST_SHARE = 0.7  # of what the link carries; an H200 on PCIe 5 x16 measured 55 of 63 GB/s


def gather(subject: Subject) -> Facts:
    if not subject.transfer:
        return {"left_out": "on request"}
    import torch

    if not torch.cuda.is_available() or not torch.version.cuda:
        return {"left_out": "there is no CUDA device that torch can use"}
    devices = range(min(torch.cuda.device_count(), needed(subject.launch)))
    torch.cuda.init()
    # Whole pages of ordinary memory, registered afterwards: what SGLang does with its host pool.
    host = torch.zeros(BYTES, dtype=torch.uint8)
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), BYTES, 0))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    facts: Facts = {
        "register_code": code,
        "registered_bytes": 0 if code else BYTES,
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "devices": [],
    }
    if code == 0:
        facts["devices"] = [_measure(torch, i, host, ENOUGH_S / len(devices), subject) for i in devices]
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return facts


def _measure(torch: Any, index: int, host: Any, seconds: float, subject: Subject) -> dict[str, Any]:
    with torch.cuda.device(index):
        device = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(rates) < 50:
            begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            device.copy_(host, non_blocking=True)
            finish.record()
            finish.synchronize()
            rates.append(BYTES / begin.elapsed_time(finish) / 1e6)
        properties = torch.cuda.get_device_properties(index)
    bus = f"{getattr(properties, 'pci_domain_id', 0):04x}:{getattr(properties, 'pci_bus_id', 0):02x}:"
    bus += f"{getattr(properties, 'pci_device_id', 0):02x}.0"
    rates.sort()
    return {
        "index": index,
        "name": properties.name,
        "bus": bus,
        "gbps": round(rates[len(rates) // 2], 2),
        "gbps_spread": [round(rates[0], 2), round(rates[-1], 2)],
        "copies": len(rates),
        "link_after": read_link(subject.root, bus),  # the copies have woken it
    }


def judge(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts("transfer")
    if facts.get("register_code"):
        yield error(
            f"{BYTES // 1000000} MB of host memory could not be pinned (cudaHostRegister: {facts['register_code']}); "
            "SGLang pins its whole host pool",
            "free host memory; raise the container's memory limit and `ulimit -l` (docker: --ulimit memlock=-1)",
        )
    shown = visible(examined.facts("gpu"))
    known: dict[Any, dict[str, Any]] = {gpu["bus"]: gpu for gpu in shown} | dict(enumerate(shown))
    for device in facts.get("devices", []):
        told = {k: v for k, v in device["link_after"].items() if v is not None}
        link = {**(known.get(device["bus"]) or known.get(device["index"], {})), **told}
        generation, width = link.get("gen_max"), link.get("width_max") or link.get("width")
        ceiling = GB_PER_LANE.get(generation or 0, 0.0) * (width or 0)
        if ceiling and device["gbps"] < LEAST_SHARE * ceiling:
            now = f"generation {link.get('gen')} x{link.get('width')} after the copies"
            yield warning(
                f"GPU {device['index']} takes {device['gbps']:.1f} GB/s from the host, {device['gbps'] / ceiling:.0%} "
                f"of its link (PCIe {generation} x{width}: {ceiling:.0f} GB/s; {now}); swap-in is that much slower",
                "stop what else uses the link; bind the server to the GPU's NUMA node; check the slot, the BIOS's link "
                "speed and IOMMU settings",
            )


def failed(examined: Examined, failure: str) -> Iterator[Finding]:
    if examined.failure("torch") or not examined.facts("gpu").get("gpus"):
        return  # said there
    yield warning(
        f"the host-to-device rate could not be measured: {failure}",
        "free some GPU and host memory (0.5 GB are enough) and run again, or leave it out with --no-transfer",
    )


def shown(facts: Facts) -> str:
    if "left_out" in facts:
        return f"not measured: {facts['left_out']}"
    return ", ".join(f"GPU {d['index']}: {d['gbps']:.1f} GB/s from pinned host memory" for d in facts["devices"])


PROBE = Probe("transfer", gather, judge, shown, limit_s=120, failed=failed, alone=True)
