"""Installing is enough: the unmodified launcher of every release shows, obeys and hands down the plugin's flags."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from sites import RELEASES, Site, install, make_site, server_arguments, started

FIRST = "0.5.10.post1"  # activated by the .pth file
LOADER = "0.5.12"  # activated by SGLang's loader
every_release = pytest.mark.parametrize("sglang", RELEASES, indirect=True)
both_ways = pytest.mark.parametrize("sglang", [FIRST, LOADER], indirect=True)
LINE = re.compile(r"HiSparse overlay (\S+): (applied|skipped|refused): (.*)")


def reported(log: str) -> dict[str, tuple[str, str]]:
    return {m[1]: (m[2], m[3]) for m in LINE.finditer(log)}


def status(site: Site, sglang: Path) -> dict[str, str]:
    out = site.run("-m", "sglang_hisparse_plugin.cli", "status", "--json", "--sglang-path", str(sglang)).stdout
    return {name: entry["outcome"] for name, entry in json.loads(out)["overlays"].items()}


@every_release
def test_help_shows_the_flags(site: Site, sglang: Path) -> None:
    text = site.run("-m", "sglang.launch_server", "--help", sglang=sglang).stdout
    assert "--hisparse-plugin {auto,strict,off}" in text and "--hisparse-plugin-skip ID[,ID...]" in text


@every_release
def test_the_scheduler_process_reports_every_overlay_and_obeys_the_flags(site: Site, sglang: Path, model: Path) -> None:
    argv = server_arguments(model, "--hisparse-plugin", "strict", "--hisparse-plugin-skip", "batch-full")
    with started(site, sglang, argv) as log:
        lines = reported(log)
    expected = {**status(site, sglang), "batch-full": "skipped"}
    assert {name: outcome for name, (outcome, _) in lines.items()} == expected, log[-3000:]
    assert lines["batch-full"][1] == "left out on request"


@both_ways
def test_an_editable_install_works_too(editable_site: Site, sglang: Path, model: Path) -> None:
    with started(editable_site, sglang, server_arguments(model)) as log:
        assert reported(log).keys() == status(editable_site, sglang).keys(), log[-3000:]


@both_ways
def test_engine_users_set_the_environment(site: Site, sglang: Path, model: Path) -> None:
    script = site.root / "engine.py"
    script.write_text(
        "import sys, sglang\nif __name__ == '__main__':\n"
        "    sglang.Engine(model_path=sys.argv[1], load_format='dummy', device='cpu', skip_tokenizer_init=True,\n"
        "                  disable_radix_cache=True, enable_hisparse=True, attention_backend='nsa', log_level='info')\n"
    )
    with started(site, sglang, [str(script), str(model)], {"SGLANG_HISPARSE_PLUGIN_SKIP": "batch-full"}) as log:
        lines = reported(log)
    assert {n: o for n, (o, _) in lines.items()} == {**status(site, sglang), "batch-full": "skipped"}, log[-3000:]


FLAGS = {"sglang.srt.server_args:ServerArgs.add_cli_args": 1, "sglang.srt.server_args:ServerArgs.from_cli_args": 1}
PROCESS = str(Path(__file__).with_name("process.py"))


def patched(text: str) -> dict[str, int]:
    (line,) = [line for line in text.splitlines() if line.startswith("PATCHED ")]
    found: dict[str, int] = json.loads(line.removeprefix("PATCHED "))
    return found


@both_ways
def test_off_touches_nothing_but_the_flags(site: Site, sglang: Path) -> None:
    on = patched(site.run(PROCESS, sglang=sglang).stdout)
    assert on.keys() > FLAGS.keys() and "sglang.srt.managers.scheduler:Scheduler.__init__" in on
    assert patched(site.run(PROCESS, sglang=sglang, env={"SGLANG_HISPARSE_PLUGIN": "off"}).stdout) == FLAGS
    assert patched(site.run(PROCESS, sglang=sglang, env={"SGLANG_PLUGINS": "somebody_else"}).stdout) == {}


OTHER_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def see(original, *args, **kwargs):
    print("the other plugin saw release_req")
    return original(*args, **kwargs)

def register():
    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.release_req", see, HookType.AROUND)
"""


def install_other_plugin(folder: Path, name: str) -> None:
    """An entry point `name`; SGLang's loader goes through them in the order in which it finds them."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(OTHER_PLUGIN)


@both_ways
@pytest.mark.parametrize("order", ["before", "after"])
def test_another_plugin_on_the_same_function_keeps_working(
    wheel: Path, sglang: Path, tmp_path: Path, order: str
) -> None:
    site = make_site(tmp_path / "venv")
    install(site, str(wheel))
    argv = [PROCESS, "--call"]
    if sglang.name == FIRST:
        argv.append(f"--wrap-{order}")
        env = {}
    else:
        install_other_plugin(tmp_path / "other", "other_plugin")
        path = f"{tmp_path / 'other'}:{{}}" if order == "before" else f"{{}}:{tmp_path / 'other'}"
        env = {"PYTHONPATH": path.format(site.environment(sglang, None)["PYTHONPATH"])}
    ended = site.run(*argv, sglang=sglang, env=env)
    assert "the other plugin saw release_req" in ended.stdout, ended.stdout[-3000:]
    assert "upstream's release_req was reached" in ended.stdout, ended.stdout[-3000:]
    assert "sglang.srt.managers.scheduler:Scheduler.__init__" in patched(ended.stdout)


@pytest.fixture
def fork(sglang: Path, tmp_path: Path) -> Path:
    """`sglang` with a `release_req` that takes the request's slot away through another function."""
    shutil.copytree(sglang, tmp_path / "fork", copy_function=_link)
    source = tmp_path / "fork" / "sglang" / "srt" / "managers" / "schedule_batch.py"
    text = source.read_text()
    source.unlink()
    assert re.search(r"^(\s*)release_kv_cache\(", text, flags=re.M)
    source.write_text(re.sub(r"^(\s*)release_kv_cache\(", r"\1give_back_slot(", text, flags=re.M))
    return tmp_path / "fork"


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


@both_ways
def test_strict_stops_a_fork_before_it_loads_a_model(site: Site, fork: Path, model: Path) -> None:
    ended = site.run(*server_arguments(model, "--hisparse-plugin", "strict"), sglang=fork)
    assert ended.returncode == 1, ended.stdout[-3000:]
    assert "HiSparse plugin: --hisparse-plugin strict: retract" in ended.stdout and "refused" in ended.stdout
    assert "Load weight begin" not in ended.stdout


@both_ways
def test_auto_says_what_a_fork_goes_without(site: Site, fork: Path, model: Path) -> None:
    with started(site, fork, server_arguments(model)) as log:
        refused = [reason for outcome, reason in reported(log).values() if outcome == "refused"]
    assert refused and all(reason.startswith("Without it ") for reason in refused), log[-3000:]


@pytest.mark.parametrize("sglang", ["0.5.9"], indirect=True)
def test_a_release_without_hisparse_is_left_alone(site: Site, sglang: Path, model: Path) -> None:
    assert set(status(site, sglang).values()) == {"skipped"}
    argv = [a for a in server_arguments(model) if a != "--enable-hisparse"]
    with started(site, sglang, argv) as log:
        assert "HiSparse plugin" not in log and "Traceback" not in log.split("Load weight begin")[0]


@both_ways
def test_bad_settings_are_errors_that_name_the_choices(site: Site, sglang: Path, model: Path) -> None:
    unknown = site.run(*server_arguments(model, "--hisparse-plugin-skip", "nonsense"), sglang=sglang)
    assert unknown.returncode == 2 and "no overlay is called nonsense; there are " in unknown.stdout
    bad = site.run(*server_arguments(model), sglang=sglang, env={"SGLANG_HISPARSE_PLUGIN": "maybe"})
    assert bad.returncode == 2 and "SGLANG_HISPARSE_PLUGIN: 'maybe' is not one of auto, strict, off" in bad.stdout
