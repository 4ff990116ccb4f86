"""Host memory against what the flags will pin: what is free, what the container may have, what may be locked."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from ...sizing import formulas
from .. import files
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, note, warning
from ..sizes import GIB, Sizes, sizes
from . import gpu

RESERVE = 10 * GIB  # of host memory, which SGLang leaves free (HostKVCache.__init__)
CAP_IPC_LOCK = 14  # linux/capability.h
NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number


def gather(subject: Subject) -> Facts:
    told = files.text(subject.root / "proc/meminfo")
    known = {key: int(kib) * 1024 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB", told, re.MULTILINE)}
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", files.text(subject.root / "proc/self/status"), re.MULTILINE)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": known.get("MemTotal"),
        "available_bytes": known.get("MemAvailable"),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "memlock_hard_bytes": None if hard == resource.RLIM_INFINITY else hard,
        "may_lock_all": bool(capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1),
        "cgroup": _cgroup(subject.root),
    }


def _cgroup(root: Path) -> Facts | None:
    """The tightest memory limit of this process's control groups: limit, use, and what of it can be taken back."""
    found = []
    for line in files.text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        folder = base / path.lstrip("/")
        while True:
            found.append(_limit(folder, *names))
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    limits = [entry for entry in found if entry]
    return min(limits, key=lambda entry: int(entry["left_bytes"]), default=None)


def _limit(folder: Path, limit: str, use: str, cache: str) -> Facts | None:
    most, now = files.text(folder / limit).strip(), files.text(folder / use).strip()
    if not most.isdigit() or not now.isdigit() or int(most) >= NO_LIMIT:
        return None
    reclaimable = re.search(rf"^{cache} (\d+)", files.text(folder / "memory.stat"), re.MULTILINE)
    left = int(most) - int(now) + (int(reclaimable[1]) if reclaimable else 0)
    return {"group": str(folder), "limit_bytes": int(most), "left_bytes": left}


def judge(examined: Examined) -> Iterator[Finding]:
    facts, size = examined.facts("memory"), sizes(examined)
    if facts["available_bytes"] is None:
        yield warning(
            "how much host memory is free cannot be read: /proc/meminfo tells nothing",
            "mount /proc; SGLang reads it, too",
        )
    if size:
        yield from _judge_pool(facts, size)
        yield from _judge_nodes(examined, size)
    yield from _judge_memlock(examined, facts, size)


def _judge_pool(facts: Facts, size: Sizes) -> Iterator[Finding]:
    each = f" ({size.ranks} ranks with {size.rank_bytes / GIB:.1f} GiB each)" if size.ranks > 1 else ""
    needs = f"{'' if size.certain else 'up to '}{size.pinned_bytes / GIB:.1f} GiB{each}"
    level = error if size.certain else warning
    places = []
    if facts["available_bytes"] is not None:
        free = max(0, facts["available_bytes"] - RESERVE)
        places.append((free, "are free here less the 10 GiB that SGLang spares", "add memory"))
    if facts["cgroup"]:
        left = facts["cgroup"]["left_bytes"]
        places.append((left, "are left to this container", "raise its memory limit"))
    for free, what, more in places:
        if size.pinned_bytes > free:
            yield level(
                f"the host pool will pin {needs}, but {free / GIB:.1f} GiB {what} "
                f"(number of device slots: {size.basis})",
                f"{_smaller(size, free)}, or {more}",
            )


def _smaller(size: Sizes, free: int) -> str:
    """Flags that make the pool fit into `free` bytes."""
    hisparse, row = size.server.hisparse, size.server.row * size.server.model.layers * size.ranks
    rows = max(0, free // row - 2 * hisparse.page_size)
    ratio = rows // max(1, size.server.device_tokens)
    slots = rows // hisparse.host_to_device_ratio // hisparse.page_size * hisparse.page_size
    ways = [f"host_to_device_ratio {ratio}"] if ratio >= 2 else []
    ways += [f"--max-total-tokens {slots}"] if slots >= hisparse.padded_buffer else []
    if ways:
        return "lower it with " + " or ".join(ways)
    return "use fewer ranks on this host" if size.ranks > 1 else "lower host_to_device_ratio and device_buffer_size"


def _judge_nodes(examined: Examined, size: Sizes) -> Iterator[Finding]:
    nodes = examined.facts("gpu").get("nodes", {})
    homes = [g.get("node") for g in gpu.used(examined)]
    for home in sorted({node for node in homes if node is not None}) if len(nodes) > 1 else []:
        total = nodes.get(str(home), {}).get("total_bytes")
        wanted = homes.count(home) * size.rank_bytes
        if total and wanted > total:
            yield note(
                f"the pools of the GPUs on NUMA node {home} ({wanted / GIB:.1f} GiB) are larger than that node "
                f"({total / GIB:.1f} GiB): some rows will be on another one",
                "do not bind memory strictly (numactl --preferred, not --membind), or lower host_to_device_ratio",
            )


def _judge_memlock(examined: Examined, facts: Facts, size: Sizes | None) -> Iterator[Finding]:
    """CUDA pins through its driver, which this limit need not concern; RDMA counts against it."""
    limit, rdma = facts["memlock_bytes"], examined.subject.launch.get("disaggregation_mode", "null") != "null"
    needs = size.pinned_bytes if size else None
    if limit is None or (needs is not None and limit >= needs) or facts["may_lock_all"]:
        return
    transfer = examined.facts("transfer")
    what = f"memory may be locked up to {limit / (1 << 20):g} MiB (ulimit -l)"
    what += f", and the host pool pins {needs / GIB:.1f} GiB" if needs is not None else ""
    remedy = "ulimit -l unlimited, LimitMEMLOCK=infinity for systemd, or --ulimit memlock=-1 for docker"
    if rdma:
        yield warning(f"{what}; RDMA registers it under that limit with --disaggregation-mode", remedy)
    elif transfer.get("registered_bytes", 0) > limit:
        mb = transfer["registered_bytes"] // 1000000
        yield note(f"{what}; CUDA goes past it on this host ({mb} MB pinned), RDMA would not", remedy)
    else:
        yield warning(f"{what}; whether CUDA goes past it here was not measured", remedy)


def shown(facts: Facts) -> str:
    limit = facts["memlock_bytes"]
    parts = [
        "unknown"
        if facts["available_bytes"] is None
        else f"{facts['available_bytes'] / GIB:.0f} of {(facts['total_bytes'] or 0) / GIB:.0f} GiB available",
        "memlock " + ("unlimited" if limit is None else f"{limit / (1 << 20):g} MiB"),
    ]
    if facts["may_lock_all"]:
        parts[-1] += " (CAP_IPC_LOCK: no limit)"
    if cgroup := facts["cgroup"]:
        parts.append(f"container: {cgroup['left_bytes'] / GIB:.0f} of {cgroup['limit_bytes'] / GIB:.0f} GiB left")
    return ", ".join(parts)


PROBE = Probe("memory", gather, judge, shown)


def device_shortfall(size: Sizes) -> int:
    """Device bytes that the pools take beyond what SGLang reckons with when it divides its budget."""
    server = size.server
    real = formulas.total(server, "device")
    return real - formulas.cell_bytes(server) * server.device_tokens
