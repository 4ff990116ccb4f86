"""What the plugin costs a Python that never imports SGLang, what is in the wheel, and two copies side by side."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

from sites import CHECKOUT, Site, install, make_site

LOADED = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def test_a_python_without_sglang_imports_nothing_more(site: Site, bare_site: Site) -> None:
    assert json.loads(site.run("-c", LOADED).stdout) == json.loads(bare_site.run("-c", LOADED).stdout)
    watching = "import sys; print(any(getattr(f, 'watches', '') == 'sglang' for f in sys.meta_path))"
    assert (site.run("-c", watching).stdout, bare_site.run("-c", watching).stdout) == ("True\n", "False\n")


def test_a_pth_file_left_behind_does_no_harm(wheel: Path, tmp_path: Path) -> None:
    site = make_site(tmp_path / "venv")
    install(site, str(wheel))
    shutil.rmtree(site.packages / "sglang_hisparse_plugin")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("print('imported')")
    ended = site.run("-c", "import sglang", env={"PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (0, "imported\n")


def test_a_folder_called_sglang_is_not_sglang(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    ended = site.run("-m", "sglang_hisparse_plugin.cli", "status", env={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 2 and "SGLang is not installed here" in ended.stdout


def test_the_wheel_carries_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {f"sglang_hisparse_plugin/{part}" for part in ("csrc", "patches")}
    assert "sglang_hisparse_plugin.pth" in names
    for folder in package:
        inside = {n.removeprefix("sglang_hisparse_plugin/") for n in names if n.startswith(folder + "/")}
        outside = {str(p.relative_to(CHECKOUT)) for p in (CHECKOUT / Path(folder).name).rglob("*") if p.is_file()}
        assert inside == outside and inside
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert not any(name in " ".join(required) for name in ("sglang", "torch", "flashinfer"))


def test_status_without_sglang(site: Site) -> None:
    ended = site.run("-m", "sglang_hisparse_plugin.cli", "status")
    assert ended.returncode == 2 and "SGLang is not installed here" in ended.stdout
    assert "not active" not in ended.stdout
    ended = site.run("-m", "sglang_hisparse_plugin.cli", "status", "--json", "--sglang-path", str(site.root))
    assert ended.returncode == 2 and "has no folder sglang/srt" in ended.stdout


def test_two_copies_are_reported(wheel: Path, tmp_path: Path) -> None:
    site = make_site(tmp_path / "venv")
    install(site, str(wheel))
    second = tmp_path / "second"
    for part in site.packages.glob("sglang_hisparse_plugin*"):
        copy = shutil.copytree if part.is_dir() else shutil.copy
        second.mkdir(exist_ok=True)
        copy(part, second / part.name)
    out = site.run(
        "-m",
        "sglang_hisparse_plugin.cli",
        "status",
        "--sglang-path",
        str(_fake_sglang(tmp_path)),
        env={"PYTHONPATH": str(second)},
    )
    assert "several copies are installed" in out.stdout


def _fake_sglang(folder: Path) -> Path:
    (folder / "fake" / "sglang" / "srt").mkdir(parents=True)
    return folder / "fake"
