"""The list of stand-ins that the demo prints is the list of stand-ins there are."""

from __future__ import annotations

from pathlib import Path

from sglang_hisparse_plugin.demo import cpu, scales, setup

NOT_A_STAND_IN = {
    "SGLANG_HISPARSE_DEMO_CPU",  # arms them
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
}


def flags(scale: scales.Scale, sglang: Path) -> set[str]:
    launcher = setup.Launcher(setup.Target("fake", sglang), scale, Path("model"), Path("work"), lambda text: None)
    return {flag.partition("=")[0] for flag in launcher._command(hisparse=True)}


def test_every_module_variable_and_flag_that_differs_on_a_cpu_is_listed(tmp_path: Path) -> None:
    modules = {file.stem for file in Path(cpu.__file__).parent.glob("*.py")} - {"__init__"}
    variables = set(cpu.environment(None, base={})) - NOT_A_STAND_IN
    only_cpu = flags(scales.CPU, tmp_path) - flags(scales.CUDA, tmp_path) - {"--device"}
    assert set(cpu.STAND_INS) == modules | variables | only_cpu
