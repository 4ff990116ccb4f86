"""What compiles the kernels at first use, and where the results go."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ...kernels import build
from ..examine import Examined, Facts, Probe, Subject
from ..finding import Finding, error, warning

SECONDS = 10.0
#: The oldest nvcc for a compute capability's major.
NEEDED_NVCC = {8: (11, 1), 9: (11, 8), 10: (12, 8), 12: (12, 8)}
MIB = 1 << 20
CACHE_NEEDS, CACHE_WANTS = 64 * MIB, 1024 * MIB


def gather(_subject: Subject) -> Facts:
    nvcc = build.find_nvcc()
    text = _ask(nvcc, "--version") if nvcc else ""
    release = re.search(r"release (\d+)\.(\d+)", text)
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    # Where tvm-ffi looks: the environment, then above the nvcc on PATH, then this.
    on_path = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or (on_path and str(Path(on_path).parents[1]))
    home = home or "/usr/local/cuda"
    return {
        "nvcc": nvcc,
        "nvcc_release": f"{release[1]}.{release[2]}" if release else None,
        "nvcc_says": text[-300:],
        "cuda_home": home,
        "home_nvcc": os.access(Path(home) / "bin" / "nvcc", os.X_OK),
        "cudart": _has_cudart(Path(home) / "lib64", *_linked()),
        "cudart_elsewhere": _cudart_beside(nvcc) if nvcc else None,
        "compiler": compiler,
        "compiler_wanted": os.environ.get("CXX", "c++"),
        "compiler_says": _ask(compiler, "--version").partition("\n")[0] if compiler else "",
        "ninja": shutil.which("ninja"),
    }


def _linked() -> list[Path]:
    """Folders where the linker looks without being told."""
    given = filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
    machine = f"{platform.machine()}-linux-gnu"
    return [*map(Path, given), *(Path(p) for p in (f"/usr/lib/{machine}", "/usr/lib64", "/usr/lib", "/usr/local/lib"))]


def _has_cudart(*folders: Path) -> bool:
    return any((folder / "libcudart.so").exists() for folder in folders)


def _cudart_beside(nvcc: str) -> str | None:
    """The folder of the toolkit that an nvcc really belongs to."""
    homes = [Path(nvcc).resolve().parents[1], Path("/usr/local/cuda")]
    folders = [folder for home in homes for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib"))]
    return next((str(folder) for folder in folders if _has_cudart(folder)), None)


def _ask(program: str, *arguments: str) -> str:
    try:
        ended = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SECONDS, errors="replace", check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (ended.stdout or ended.stderr).strip()


def judge(examined: Examined) -> Iterator[Finding]:
    facts = examined.facts("toolchain")
    if examined.facts("torch").get("hip"):
        return
    if not facts["nvcc"]:
        yield error(
            "there is no CUDA compiler (nvcc): SGLang and the plugin compile their swap-in kernels at first use",
            "install the CUDA toolkit that fits torch's CUDA, then put its bin on PATH or set CUDA_HOME",
        )
    elif not facts["nvcc_release"]:
        yield error(f"{facts['nvcc']} does not run: {facts['nvcc_says']}", "repair or reinstall the CUDA toolkit")
    else:
        yield from _judge_nvcc(examined, facts)
    if not facts["compiler"]:
        yield error(
            f"there is no C++ compiler ({facts['compiler_wanted']}), which nvcc and tvm-ffi need",
            "apt-get install g++, or set CXX to one",
        )
    if not facts["ninja"]:
        yield error(
            "there is no ninja on PATH, which tvm-ffi builds with", "pip install ninja, or apt-get install ninja-build"
        )


def _judge_nvcc(examined: Examined, facts: Facts) -> Iterator[Finding]:
    release = tuple(map(int, facts["nvcc_release"].split(".")))
    cuda = examined.facts("torch").get("cuda")
    if cuda and str(release[0]) != str(cuda).partition(".")[0]:
        yield warning(
            f"nvcc is of CUDA {facts['nvcc_release']}, torch was built for CUDA {cuda}",
            f"set CUDA_HOME to a CUDA {str(cuda).partition('.')[0]} toolkit",
        )
    for capability in sorted({g.get("capability") or "" for g in examined.facts("gpu").get("gpus", [])} - {""}):
        needed = NEEDED_NVCC.get(int(capability.partition(".")[0]), (0, 0))
        if release < needed:
            yield error(
                f"nvcc {facts['nvcc_release']} cannot compile for compute capability {capability}",
                f"install CUDA {needed[0]}.{needed[1]} or later and point CUDA_HOME to it",
            )
    if not facts["home_nvcc"]:
        yield error(
            f"SGLang's JIT will run {facts['cuda_home']}/bin/nvcc, which is not there; the compiler is {facts['nvcc']}",
            f"export CUDA_HOME={Path(facts['nvcc']).parents[1]}",
        )
    elif not facts["cudart"]:
        yield warning(
            f"the linker will look for libcudart in {facts['cuda_home']}/lib64, where it is not",
            f"export LIBRARY_PATH={folder} LD_LIBRARY_PATH={folder}"
            if (folder := facts["cudart_elsewhere"])
            else "install the CUDA runtime's development files (libcudart.so), or name their folder in LIBRARY_PATH",
        )


def shown(facts: Facts) -> str:
    nvcc = f"nvcc {facts['nvcc_release'] or '?'} ({facts['nvcc']})" if facts["nvcc"] else "no nvcc"
    ninja = "ninja" if facts["ninja"] else "no ninja"
    return f"{nvcc}; {facts['compiler_says'] or 'no C++ compiler'}; {ninja}"


#: Folders that are written at first use: what for, the variable that moves it, and where it is without.
CACHES = (
    ("compiled kernels", "TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi"),
    ("Triton's kernels", "TRITON_CACHE_DIR", "~/.triton/cache"),
    ("temporary files of the compiler", "TMPDIR", "/tmp"),
)


def gather_caches(_subject: Subject) -> Facts:
    return {"folders": [_folder(*row) for row in CACHES]}


def _folder(purpose: str, variable: str, default: str) -> Facts:
    facts: Facts = {"purpose": purpose, "variable": variable, "path": os.environ.get(variable) or default}
    try:
        path = Path(facts["path"]).expanduser()
    except RuntimeError:  # a user without a home
        return {**facts, "problem": "there is no home directory"}
    facts["path"] = str(path)
    return {**facts, **_writable(path, must_execute=variable != "TMPDIR")}


def _writable(path: Path, must_execute: bool) -> Facts:
    """Free space at `path`, or what is in the way of writing there; found without writing."""
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    try:
        status = os.statvfs(above)
    except OSError as error:
        return {"problem": f"{above}: {error.strerror}"}
    problems = {
        "is no folder": not above.is_dir(),
        "is on a read-only file system": status.f_flag & os.ST_RDONLY,
        "is not writable": not os.access(above, os.W_OK | os.X_OK),
        "has no inodes left": status.f_files and not status.f_favail,
        "is mounted noexec, so compiled code cannot be loaded from it": must_execute and status.f_flag & os.ST_NOEXEC,
    }
    problem = next((f"{above} {text}" for text, holds in problems.items() if holds), None)
    return {"problem": problem} if problem else {"free_bytes": status.f_bavail * status.f_frsize}


def judge_caches(examined: Examined) -> Iterator[Finding]:
    for folder in examined.facts("caches")["folders"]:
        move = f"set {folder['variable']} to a folder on a local disk that this user can write"
        if problem := folder.get("problem"):
            yield error(f"no place for {folder['purpose']} ({folder['path']}): {problem}", move)
        elif folder["free_bytes"] < CACHE_WANTS:
            level = error if folder["free_bytes"] < CACHE_NEEDS else warning
            yield level(
                f"{folder['free_bytes'] // MIB} MiB are free for {folder['purpose']} ({folder['path']})",
                f"free at least 1 GiB there, or {move}",
            )


def shown_caches(facts: Facts) -> str:
    return ", ".join(f"{f['path']} ({f.get('problem') or _free(f)})" for f in facts["folders"])


def _free(folder: Facts) -> str:
    return f"{folder['free_bytes'] / (1 << 30):.0f} GiB free"


PROBES = (
    Probe("toolchain", gather, judge, shown, limit_s=30),
    Probe("caches", gather_caches, judge_caches, shown_caches),
)
