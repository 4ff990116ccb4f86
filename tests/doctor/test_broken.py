"""The whole command, in a bare Python of its own, on installations and machines that are broken in one way each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machine import BARE, CHECKOUT, RELEASE, Ran, doctor, package, program

from sglang_hisparse_plugin.demo import cpu
from sglang_hisparse_plugin.doctor.table import PROBES

NVIDIA_SMI = "0, GPU-1, NVIDIA H200, 9.0, 143771, 4, 580.65.06, 00000000:1B:00.0, 1, 5, 16, 16, Disabled"


def complete(ran: Ran) -> None:
    """Whatever is broken, the report is whole: every probe has its place, every finding its remedy."""
    report = ran.report
    assert list(report["facts"]) == [probe.name for probe in PROBES] and "Traceback" not in ran.err
    assert all(f["what"] and f["remedy"] for f in report["findings"])
    assert not [f for f in report["findings"] if "could not be judged" in f["what"]]
    levels = [("note", "warning", "error").index(f["level"]) for f in report["findings"]]
    assert ran.code == report["exit_code"] == max(levels) and levels == sorted(levels, reverse=True)


def test_it_runs_with_nothing_but_the_package() -> None:
    ran = doctor()
    complete(ran)
    assert ran.code == 2
    (needs,) = [what for level, what in ran.findings("python") if level == "error"]
    assert "packaging rich unidiff wrapt" in needs
    assert ran.findings("sglang")[0][1].startswith("SGLang is not installed here")
    assert ran.findings("torch") == [("error", "torch is not installed")]


def test_the_command_imports_the_standard_library_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "import sglang_hisparse_plugin.cli.doctor\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(tops - set(sys.stdlib_module_names) - {'__main__', 'sglang_hisparse_plugin'}))"
    )
    ended = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
    installed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "rich", "wrapt", "packaging"} & set(eval(installed.stdout))


def test_text_has_every_remedy_and_ends_with_the_verdict() -> None:
    command = [sys.executable, "-S", "-I", "-c", BARE.format(paths=[str(CHECKOUT)]), "doctor"]
    for encoding in ("utf-8", "ascii"):
        env = {"PATH": os.environ["PATH"], "PYTHONIOENCODING": encoding}
        ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert ended.returncode == 2 and ended.stdout.count("-> ") >= 4
        assert "\nVerdict: will not serve: " in ended.stdout and "\x1b" not in ended.stdout


IMPORTS = {
    "raises": ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "died of SIGSEGV"),
    "ends the process": ("import os; os._exit(0)", "ended without an answer"),
    "exits": ("raise SystemExit('no licence')", "SystemExit: no licence"),
    "hangs": ("import time; time.sleep(1000)", "no answer in 2 s"),
    "is half there": ("", "AttributeError"),
    "has no such name": ("from typing import Nothing", "ImportError"),
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_a_torch_that(kind: str, tmp_path: Path) -> None:
    source, says = IMPORTS[kind]
    ran = doctor("--time-limit", "2" if kind == "hangs" else "100", paths=(package(tmp_path, "torch", source),))
    complete(ran)
    ((level, what),) = ran.findings("torch")
    assert level == "error" and what.startswith("torch does not import: ") and says in what, what


def test_an_sglang_that_raises_is_read_all_the_same(wheel: Path, tmp_path: Path) -> None:
    """Its files are there, its `__init__` raises: the release is known, the overlays are planned."""
    fork = tmp_path / "fork"
    shutil.copytree(wheel, fork, copy_function=os.symlink)
    (fork / "sglang" / "__init__.py").unlink()
    (fork / "sglang" / "__init__.py").write_text("raise RuntimeError('wrong CUDA')")
    ran = doctor(paths=(fork,))
    complete(ran)
    assert ran.report["facts"]["sglang"]["version"] == RELEASE
    ((level, what),) = ran.findings("import sglang")
    assert level == "error" and what == "sglang does not import: RuntimeError: wrong CUDA"


@pytest.mark.parametrize(
    "damage",
    [
        "schedule_batch.py is no Python",
        "srt is missing",
        "metadata is empty",
        "scheduler.py is binary",
    ],
)
def test_a_damaged_sglang(wheel: Path, tmp_path: Path, damage: str) -> None:
    fork = tmp_path / "fork"
    shutil.copytree(wheel, fork, copy_function=os.symlink)
    if damage == "srt is missing":
        shutil.rmtree(fork / "sglang" / "srt")
    elif damage == "metadata is empty":
        (metadata,) = fork.glob("sglang-*.dist-info/METADATA")
        metadata.unlink()
        metadata.write_text("")
    else:
        path = fork / "sglang" / "srt" / "managers" / damage.partition(" ")[0]
        path.unlink()
        path.write_bytes(b"def (:" if "Python" in damage else bytes(range(256)) * 40)
    site = Path(sys.modules["wrapt"].__file__ or "").parents[1] if "wrapt" in sys.modules else None
    ran = doctor("--sglang-path", str(fork), paths=(site,) if site else ())
    complete(ran)


def smi(folder: Path, script: str) -> dict[str, str]:
    return {"PATH": program(folder / "bin", "nvidia-smi", script)}


def test_an_nvidia_smi_that_hangs(tmp_path: Path) -> None:
    ran = doctor("--time-limit", "4", env=smi(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000"))
    complete(ran)
    assert "gives no answer in 3 s" in ran.findings("gpu")[0][1]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'NVIDIA-SMI has failed: no driver'; exit 9", "fails with code 9: NVIDIA-SMI has failed: no driver"),
        ("kill -9 $$", "fails with code -9"),
        ("echo garbage; echo 1,2,3", "lists no GPU"),
        ("printf '\\377\\376, \\000'", "lists no GPU"),
        ("exit 0", "lists no GPU"),
    ],
)
def test_an_nvidia_smi_that_fails(tmp_path: Path, script: str, says: str) -> None:
    ran = doctor(env=smi(tmp_path, script))
    complete(ran)
    assert ran.findings("gpu") and says in ran.findings("gpu")[0][1]


def test_no_nvidia_smi_no_compiler_no_path(tmp_path: Path) -> None:
    ran = doctor(env={"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)})
    complete(ran)
    assert ran.findings("gpu") == [("error", "there is no NVIDIA GPU here (nvidia-smi is not on PATH)")]
    assert {"there is no C++ compiler (c++), which nvcc and tvm-ffi need"} <= {w for _, w in ran.findings("toolchain")}


def test_what_an_nvidia_smi_tells(tmp_path: Path) -> None:
    ran = doctor(env=smi(tmp_path, f"echo '{NVIDIA_SMI}'; echo '{NVIDIA_SMI.replace('9.0', '[N/A]')}'"))
    complete(ran)
    first, second = ran.report["facts"]["gpu"]["gpus"]
    told = {"name": "NVIDIA H200", "capability": "9.0", "memory_mib": 143771, "bus": "0000:1b:00.0", "width": 16}
    assert told.items() <= first.items() and second["capability"] is None


def test_two_other_plugins(wheel: Path, tmp_path: Path) -> None:
    sources = {
        "one": "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "def register():\n"
        "    HookRegistry.register('sglang.srt.managers.hisparse_coordinator.HiSparseCoordinator.request_finished',\n"
        "                          None, HookType.REPLACE)\n",
        "two": "def register():\n    from sglang.srt.managers import hisparse_coordinator as h\n"
        "    h.HiSparseCoordinator.request_finished = None\n",
        "three": "def register():\n    'sglang.srt.server_args.ServerArgs.add_cli_args'\n",
    }
    for name, source in sources.items():
        package(tmp_path, name, source)
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    site = Path(sys.modules["pytest"].__file__ or "").parents[1]
    ran = doctor("--sglang-path", str(wheel), "--no-transfer", paths=(tmp_path, site))
    complete(ran)
    found = {what.split()[1]: what for level, what in ran.findings("other plugins") if level == "warning"}
    assert found.keys() == {"one", "two"}
    assert "take the place" in found["one"] and "HiSparseCoordinator.request_finished" in found["two"]


MANGLED = [
    "",
    "{",
    "[]",
    "null",
    '{"architectures": 7}',
    '{"architectures": ["DeepseekV32ForCausalLM"]}',
    "\x00\xff",
    '"' * 9,
]


@pytest.mark.parametrize("text", [*MANGLED, '{"a":' * 50000, '{"text_config": [], "architectures": ["X"]}'])
def test_a_mangled_model_configuration(wheel: Path, model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    ran = doctor("--sglang-path", str(wheel), "--", "--model-path", str(model), "--enable-hisparse")
    complete(ran)
    assert ran.findings("model")[0][0] == "error"


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path)}
    ran = doctor("--model", "deepseek-ai/DeepSeek-V3.2", env=env)
    assert [level for level, _ in ran.findings("model")] == ["note"] and "not in the local" in ran.findings("model")[0][
        1
    ]
    assert doctor("--model", "a/b", env={**env, "HF_HUB_OFFLINE": "1"}).findings("model")[0][0] == "error"
    assert doctor("--model", "/no/such").findings("model") == [("error", "no model: /no/such does not exist")]


def test_a_model_in_the_local_cache(model: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub" / "models--org--M"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("abc")
    (hub / "snapshots").mkdir()
    shutil.move(model, hub / "snapshots" / "abc")
    (hub / "snapshots" / "abc" / "a.safetensors").write_bytes(b"x" * 1000)
    facts = doctor("--model", "org/M", env={"HF_HOME": str(tmp_path)}).report["facts"]["model"]
    assert facts["config"]["index_topk"] == 2048 and facts["weights_bytes"] == 1000


def test_a_full_disk_for_the_report() -> None:
    command = [sys.executable, "-S", "-I", "-c", BARE.format(paths=[str(CHECKOUT)]), "doctor", "--json"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2 and "will not serve" in ended.stderr and "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_leaves() -> None:
    command = [sys.executable, "-S", "-I", "-c", BARE.format(paths=[str(CHECKOUT)]), "doctor"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.wait()


def hears_interrupts() -> None:
    """In the child: who runs the tests in the background of a shell has it ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interruption(tmp_path: Path) -> None:
    mark = tmp_path / "importing"
    slow = package(tmp_path, "torch", f"import time; open({str(mark)!r}, 'w').close(); time.sleep(1000)")
    code = BARE.format(paths=[str(slow), str(CHECKOUT)])
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", "-c", code, "doctor"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=hears_interrupts,  # noqa: PLW1509 (no thread runs here)
        )
        while not mark.exists():
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        mark.unlink()
        assert process.returncode == 128 + number and not out and "Traceback" not in err, err


#: Gives every capability up: root is then as bound by permissions and limits as anybody.
UNPRIVILEGED = """
import ctypes, resource
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None, use_errno=True).capset(header, nothing) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
"""


def test_a_user_without_privileges_who_may_lock_64_kib_and_write_nowhere(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    command = [sys.executable, "-S", "-I", "-c", UNPRIVILEGED + BARE.format(paths=[str(CHECKOUT)]), "doctor", "--json"]
    env = {"PATH": os.environ["PATH"], "HOME": str(home)}
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    ran = Ran(ended.returncode, ended.stdout, ended.stderr)
    complete(ran)
    assert ran.report["facts"]["memory"]["memlock_bytes"] == 65536
    assert [level for level, what in ran.findings("memory") if "may be locked" in what] == ["warning"]
    assert ("error", f"no place for compiled kernels ({home}/.cache/tvm-ffi): {home} is not writable") in ran.findings(
        "caches"
    )


def test_wrong_use() -> None:
    for arguments in (("--time-limit", "0"), ("--time-limit", "nan"), ("--nonsense",)):
        ended = doctor(*arguments)
        assert ended.code == 2 and "usage:" in ended.err
    assert "no folder sglang/srt" in doctor("--sglang-path", "/nowhere").findings("sglang")[0][1]


def test_a_real_release_with_a_real_torch(wheel: Path, model: Path) -> None:
    """Healthy but for a GPU, and for what a wheel alone does not bring."""
    env = cpu.environment(wheel, {})  # a torchvision that imports beside a CPU torch
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--enable-hisparse"]
    words += ["--disable-radix-cache", "--max-total-tokens", "6400", "--hisparse-config", '{"host_to_device_ratio": 2}']
    command = [sys.executable, "-m", "sglang_hisparse_plugin.cli", "doctor", "--json", "--", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    ran = Ran(ended.returncode, ended.stdout, ended.stderr)
    complete(ran)
    facts = ran.report["facts"]
    assert facts["sglang"]["architectures"]["dsa"] == sorted(
        [
            *("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLMNextN"),
            *("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration", "GlmMoeDsaForCausalLM"),
        ]
    )
    assert facts["sglang"]["backends_by_dtype"] == {"bfloat16": ["flashmla_sparse"], "fp8_e4m3": ["flashmla_kv"]}
    assert facts["import sglang"]["version"] == RELEASE and facts["torch"]["version"]
    assert facts["overlays"]["overlays"]["pause-staged"]["outcome"] == "applied"
    for probe in ("import sglang", "torch", "overlays", "other plugins", "model", "launch command", "memory", "python"):
        assert [f for f in ran.findings(probe) if f[0] != "note"] == [], probe
    assert json.dumps(facts)


def test_a_damaged_entry_point_of_any_package(tmp_path: Path) -> None:
    info = tmp_path / "bad-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1\n")
    (tmp_path / "nameless-1.dist-info").mkdir()
    (tmp_path / "garbage-1.dist-info").mkdir()
    (tmp_path / "garbage-1.dist-info" / "METADATA").write_bytes(b"\xff\xfe\x00 no metadata")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nno equals sign\n")
    ran = doctor(paths=(tmp_path,))
    complete(ran)
    assert any("cannot be read" in what for _, what in ran.findings("python"))


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    code = BARE.format(paths=[str(CHECKOUT)])
    command = f'exec "$0" -S -I -c "$1" doctor --json {closed}'
    ended = subprocess.run(["sh", "-c", command, sys.executable, code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    if ">" not in closed.replace("2>", ""):
        complete(Ran(ended.returncode, ended.stdout, ended.stderr))


@pytest.mark.parametrize(("limit", "value"), [("NOFILE", 12), ("AS", 300 << 20), ("FSIZE", 0)])
def test_little_of_everything(limit: str, value: int) -> None:
    prefix = f"import resource; resource.setrlimit(resource.RLIMIT_{limit}, ({value}, {value}))\n"
    command = [sys.executable, "-S", "-I", "-c", prefix + BARE.format(paths=[str(CHECKOUT)]), "doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    ran = Ran(ended.returncode, ended.stdout, ended.stderr)
    assert "Traceback" not in ran.err and ran.code == 2 and ran.report["findings"]
