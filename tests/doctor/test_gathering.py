"""Facts from made-up /proc and /sys trees, and from real wheels of other releases."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import package, program

from sglang_hisparse_plugin import config
from sglang_hisparse_plugin.demo import releases
from sglang_hisparse_plugin.doctor.examine import Subject
from sglang_hisparse_plugin.doctor.launch import Launch
from sglang_hisparse_plugin.doctor.probes import gpu, memory, overlays, sglang, toolchain, transfer


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       2000 kB\nMemFree: 100 kB\nMemAvailable:   1500 kB\n"


def test_no_proc(tmp_path: Path) -> None:
    facts = memory.gather(Subject(root=tmp_path))
    assert facts["available_bytes"] is None and facts["cgroup"] is None and not facts["may_lock_all"]
    assert gpu.gather(Subject(root=tmp_path, time_limit_s=5))["nodes"] == {}


def test_memory_and_the_tightest_group(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/status": "CapEff:\t0000000000004000\n",
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": "1000000\n",
            "sys/fs/cgroup/pod/memory.current": "900000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 50000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "1\n",
        },
    )
    facts = memory.gather(Subject(root=root))
    assert (facts["total_bytes"], facts["available_bytes"], facts["may_lock_all"]) == (2000 * 1024, 1500 * 1024, True)
    assert facts["cgroup"] == {
        "group": str(root / "sys/fs/cgroup/pod"),
        "limit_bytes": 1000000,
        "left_bytes": 1000000 - 900000 + 50000,
    }


def test_groups_of_the_first_kind_and_paths_outside_the_container(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "12:cpu:/x\n5:memory:/docker/abc\n0::/../..\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 10\n",
        },
    )
    assert memory.gather(Subject(root=root))["cgroup"]["left_bytes"] == 4010


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096)}
    assert memory.gather(Subject(root=tree(tmp_path, files)))["cgroup"] is None


DEVICE = "sys/bus/pci/devices/0000:1b:00.0"
PCI = {
    f"{DEVICE}/vendor": "0x10de\n",
    f"{DEVICE}/class": "0x030200\n",
    f"{DEVICE}/current_link_speed": "2.5 GT/s PCIe\n",
    f"{DEVICE}/max_link_speed": "32.0 GT/s PCIe\n",
    f"{DEVICE}/current_link_width": "8\n",
    f"{DEVICE}/max_link_width": "16\n",
    f"{DEVICE}/numa_node": "1\n",
    "sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n",
    "sys/bus/pci/devices/0000:00:1f.0/class": "0x030000\n",
    "sys/devices/system/node/node1/cpulist": "4-7,12\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 20 kB\nNode 1 MemFree: 10 kB\n",
    "proc/driver/nvidia/gpus/0000:1b:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 1\n",
}


def test_a_gpu_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    facts = gpu.gather(Subject(root=tree(tmp_path, PCI)))
    expected = {"index": 0, "bus": "0000:1b:00.0", "name": "NVIDIA H200", "gen": 1, "gen_max": 5}
    assert facts["gpus"] == [{**expected, "width": 8, "width_max": 16, "node": 1}]
    assert facts["nodes"] == {"1": {"cpus": "4-7,12", "free_bytes": 10240, "total_bytes": 20480}}
    assert gpu.cpu_set("4-7,12") == {4, 5, 6, 7, 12}


@pytest.mark.parametrize("text", ["", "-1\n", "Unknown\n", "\x00\xff", "9" * 400])
def test_links_that_tell_nothing(tmp_path: Path, text: str) -> None:
    files = {name: text if name.startswith(DEVICE) else value for name, value in PCI.items()}
    link = gpu.read_link(tree(tmp_path, files), "0000:1b:00.0")
    assert {link[key] for key in ("gen", "gen_max", "width", "width_max")} == {None}


GPUS = [{"index": i, "uuid": f"GPU-{i}abc"} for i in range(8)]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, list(range(8))), ("", []), ("6,7", [6, 7]), ("GPU-3", [3]), ("7, 1", [7, 1]), ("0,99,1", [0]), ("-1", [])],
)
def test_visible_gpus(visible: str | None, indices: list[int]) -> None:
    assert [g["index"] for g in gpu.visible({"gpus": GPUS, "visible": visible})] == indices


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"tp": 8}, 8),
        ({"tp": 8, "dp": 8, "dp_attention": True}, 8),
        ({"tp": 2, "dp": 4}, 8),
        ({"tp": 4, "pp_size": 2}, 8),
        ({"tp": 16, "nnodes": 2}, 8),
    ],
)
def test_gpus_that_a_command_takes_on_this_host(options: dict[str, Any], count: int) -> None:
    assert gpu.needed(Launch(options=options)) == count


def status(**changes: int) -> SimpleNamespace:
    return SimpleNamespace(
        **{"f_flag": 0, "f_files": 10, "f_favail": 5, "f_bavail": 1 << 20, "f_frsize": 4096, **changes}
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"f_flag": os.ST_RDONLY}, "is on a read-only file system"),
        ({"f_flag": os.ST_NOEXEC}, "is mounted noexec"),
        ({"f_favail": 0}, "has no inodes left"),
    ],
)
def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], says: str) -> None:
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(os, "statvfs", lambda _path: status(**changes))
    first = toolchain.gather_caches(Subject())["folders"][0]
    assert says in first["problem"] and not (tmp_path / "not").exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: status(f_bavail=0))
    assert {folder["free_bytes"] for folder in toolchain.gather_caches(Subject())["folders"]} == {0}


def test_a_cache_that_is_a_file_or_a_dangling_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("file", "file/below", "link"):
        monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / name))
        assert toolchain.gather_caches(Subject())["folders"][0]["problem"]


def test_no_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_args, **_more: None)
    facts = toolchain.gather(Subject())
    assert facts["nvcc"] is None and facts["ninja"] is None and toolchain.shown(facts)


@pytest.mark.parametrize(
    ("script", "release"), [("echo 'Cuda compilation tools, release 12.9, V12'", "12.9"), ("exit 1", None)]
)
def test_an_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, release: str | None) -> None:
    (tmp_path / "cuda").mkdir()
    program(tmp_path / "cuda" / "bin", "nvcc", script)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    facts = toolchain.gather(Subject())
    assert (facts["nvcc_release"], facts["home_nvcc"], facts["cuda_home"]) == (release, True, str(tmp_path / "cuda"))


EXPECTED = {
    "0.5.10.post1": {"has_loader": False, "top_k_from_model": False, "speculative": False, "block_size": False},
    "0.5.11": {"has_loader": True, "top_k_from_model": False, "mixed_chunk_refused": False, "takes_tokens": True},
    "0.5.15": {"top_k_from_model": True, "block_size": True, "takes_tokens": False},
    "0.5.23": {"speculative": True, "mixed_chunk_refused": True, "requires_python": ">=3.11", "lacks_hisparse": False},
    "0.5.9": {"lacks_hisparse": True, "has_hisparse": False},
}


@pytest.mark.parametrize("release", EXPECTED)
def test_what_a_release_takes(release: str) -> None:
    facts = sglang.gather(Subject(sglang_path=releases.fetch(release)))
    assert EXPECTED[release].items() <= facts.items() and facts["version"] == release
    if release != "0.5.9":
        assert "GlmMoeDsaForCausalLM" in facts["architectures"]["dsa"]
        dtypes = {"bfloat16"} if release < "0.5.12" else {"bfloat16", "fp8_e4m3"}
        assert facts["backends_by_dtype"].keys() == dtypes
        assert ("DeepseekV32ForCausalLM" in facts["draft_architectures"]) == (release >= "0.5.12")
        assert {entry["name"] for entry in facts["unmet"]} >= {"sglang-kernel"}


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("plugin_mode", "on", "--hisparse-plugin: 'on'"),
        ("plugin_skip", "nope", "no overlay is called nope"),
        ("plugin_log_interval", "soon", "'soon' is no number of seconds"),
    ],
)
def test_the_plugins_flags_are_read_as_the_server_does(option: str, value: str, says: str) -> None:
    with pytest.raises(config.ConfigError, match=says):
        overlays.gather(Subject(Launch(options={option: value})))


def test_a_pth_file_of_another_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "theirs", "import sglang\nsglang.srt.managers.schedule_batch.ScheduleBatch.release_req = None\n")
    (tmp_path / "theirs.pth").write_text("import theirs, os  # for sglang\n")
    (tmp_path / "harmless.pth").write_text("/some/folder\nimport os; os.environ\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    found = overlays.gather_others(Subject())["plugins"]
    assert found["theirs.pth"]["module"] == "theirs" and "harmless.pth" not in found
    target = "sglang.srt.managers.schedule_batch:ScheduleBatch.release_req"
    assert overlays._named(target, found["theirs.pth"]["mentions"])
    assert not overlays._named(target, ["OtherBatch.release_req", "sglang.srt", "release_req.more"])


class Events:
    """A stand-in for CUDA events: every copy takes 5 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _other: Events) -> float:
        return 5.0


@pytest.mark.parametrize("code", [0, 2])
def test_the_rate_is_measured_on_pinned_memory_that_is_given_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    """Real torch, with stand-ins for what needs a device: registered, copied to each device, unregistered."""
    import torch

    calls: list[str] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda _pointer, size, _flags: calls.append(f"register {size}") or code,
        cudaHostUnregister=lambda _pointer: calls.append("unregister"),
    )
    empty = torch.empty
    properties = SimpleNamespace(name="GPU", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "init": lambda: None,
        "cudart": lambda: cudart,
        "device": lambda index: contextlib.nullcontext(calls.append(f"device {index}")),
        "synchronize": lambda: None,
        "Event": Events,
        "get_device_properties": lambda _index: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(transfer, "ENOUGH_S", 0.2)
    facts = transfer.gather(Subject(Launch(options={"tp": 2}), root=tree(tmp_path, PCI)))
    if code:
        assert calls == ["register 256000000"] and facts["devices"] == [] and facts["registered_bytes"] == 0
        return
    assert calls == ["register 256000000", "device 0", "device 1", "unregister"]
    assert [device["gbps"] for device in facts["devices"]] == [51.2, 51.2]  # 256 MB in 5 ms
    assert facts["devices"][0]["bus"] == "0000:1b:00.0" and facts["devices"][0]["link_after"]["gen_max"] == 5
    assert transfer.shown(facts).startswith("GPU 0: 51.2 GB/s")
