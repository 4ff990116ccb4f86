"""What becomes of a server whose settings make no sense, or cannot be had."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hisparse_plugin import config, plugin
from sglang_hisparse_plugin.observe import trace
from sglang_hisparse_plugin.observe.request import unusable
from sglang_hisparse_plugin.patching.outcome import Applied, Skipped


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings are left in the environment; nothing of them is left for the next test."""
    for name in dir(config):
        if name.endswith("_VARIABLE"):
            monkeypatch.setenv(getattr(config, name), "")
    monkeypatch.setattr(plugin.engine, "plan", lambda *_: {})
    monkeypatch.setattr(plugin.engine, "verify", lambda *_: None)
    monkeypatch.setattr(plugin.installation, "find", lambda: SimpleNamespace(tree=None, version="0"))
    monkeypatch.setattr(plugin.upstream, "tp_rank", lambda *_: 0)
    monkeypatch.setattr(plugin.observe, "start", lambda *_: None)


def parse(*flags: str, hisparse: bool = True) -> str:
    """What the server's own parser would return, if it is called."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    namespace = parser.parse_args([f"--hisparse-plugin{flag}" for flag in flags])
    namespace.enable_hisparse = hisparse
    return str(plugin._from_cli_args(lambda *_: "goes on", object, namespace))


def build(hisparse: bool = True, **outcomes: Any) -> None:
    """A scheduler, in the process that inherits the environment."""
    plugin.ledger.outcomes.clear()
    plugin.ledger.outcomes.update(outcomes)
    scheduler = SimpleNamespace(hisparse_coordinator=None)
    plugin._scheduler_init(lambda *_: None, scheduler, SimpleNamespace(enable_hisparse=hisparse))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def refused(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    with pytest.raises(SystemExit) as left:
        parse(*flags)
    assert left.value.code == code
    return capsys.readouterr().err


@pytest.mark.parametrize("variable", [config.LOG_VARIABLE, config.TRACE_LAYERS_VARIABLE])
def test_a_bad_variable_ends_no_server_in_auto_and_is_told_once(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "foo"
    monkeypatch.setenv(config.TRACE_VARIABLE, "/tmp")
    monkeypatch.setenv(variable, value)
    assert f"{variable}: '{value}'" in refused(capsys, "=strict")
    build(observe=Applied("x"))  # `sglang.Engine` parses no arguments
    assert parse() == "goes on"
    build(observe=Applied("x"))
    told = warnings(caplog)
    assert len(told) == 2 and all(f"HiSparse plugin: {variable}: '{value}'" in line for line in told)


def test_a_bad_flag_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("auto", "strict", "off"):
        assert "'often' is no number of seconds" in refused(capsys, f"={mode}", "-log-interval=often")
        assert "no overlay is called frist" in refused(capsys, f"={mode}", "-skip=frist")


@pytest.mark.parametrize(("variable", "value"), [(config.SKIP_VARIABLE, "frist"), (config.MODE_VARIABLE, "on")])
def test_which_repairs_run_is_not_guessed_where_it_matters(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    assert value in refused(capsys)
    assert parse(hisparse=False) == "goes on"
    plugin._hook_scheduler(SimpleNamespace(install=lambda *_: None))  # an import ends no process
    build(hisparse=False)
    with pytest.raises(SystemExit):
        build()


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none"), Path("/proc/self/fd")):
        reason = unusable(folder)
        assert reason and str(folder) in reason
        assert reason in refused(capsys, "=strict", f"-trace={folder}", code=1)
        assert parse("=auto", f"-trace={folder}") == "goes on"
        trace.attach(SimpleNamespace(), config.Config(trace_dir=str(folder)))
        assert warnings(caplog) == [f"HiSparse trace: no trace can be recorded: {reason}"]
        assert trace.recorder() is None
        caplog.clear()
    assert unusable(tmp_path / "new" / "folder") is None and not [*(tmp_path / "new" / "folder").iterdir()]


def test_a_layer_that_the_model_lacks(caplog: pytest.LogCaptureFixture) -> None:
    assert trace.recorded_layers((0, 7, 60), 61) == (0, 7, 60) and not warnings(caplog)
    assert trace.recorded_layers((), 61) == (0, 20, 40, 60) and not warnings(caplog)
    assert trace.recorded_layers((7, 61, 99), 61) == (7,)
    assert trace.recorded_layers((99,), 2) == (0, 1)
    assert [line.partition("names ")[2] for line in warnings(caplog)] == [
        "layers 61, 99, but there are 0 to 60",
        "layers 99, but there are 0 to 1",
    ]


@pytest.mark.parametrize("flag", ["-log-interval=5", "-trace=/somewhere"])
def test_that_nothing_will_be_observed_is_told_once(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    parse(flag, hisparse=False)
    build(hisparse=False)
    assert warnings(caplog) == [
        "HiSparse plugin: there is no --enable-hisparse, so there is neither a log line nor a trace of it"
    ]
    caplog.clear()
    parse("=off", flag)
    assert ["--hisparse-plugin is off" in line for line in warnings(caplog)] == [True]
    caplog.clear()
    parse("=auto", flag)
    build(observe=Skipped("left out"))
    assert ["overlay observe is not applied" in line for line in warnings(caplog)] == [True]
    caplog.clear()
    parse("-log-interval=0", "-trace=", hisparse=False)
    build(hisparse=False)
    assert warnings(caplog) == []
