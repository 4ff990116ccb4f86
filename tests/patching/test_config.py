"""Flags, their environment twins, and what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from sglang_hisparse_plugin import config

IDS = ("first", "second")
VARIABLES = (
    *(config.MODE_VARIABLE, config.SKIP_VARIABLE, config.PLUGINS_VARIABLE),
    *(config.LOG_VARIABLE, config.TRACE_VARIABLE, config.TRACE_LAYERS_VARIABLE),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def parse(*argv: str) -> config.Config:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    config.add_flags(parser)
    namespace = parser.parse_args(argv)
    settings = config.take_flags(namespace, IDS)
    assert vars(namespace) == {}
    return settings


def test_defaults() -> None:
    assert parse() == config.Config("auto", frozenset())


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.MODE_VARIABLE, "off")
    monkeypatch.setenv(config.SKIP_VARIABLE, "first")
    assert parse() == config.Config("off", frozenset({"first"}))
    assert parse("--hisparse-plugin", "strict") == config.Config("strict", frozenset({"first"}))
    assert parse("--hisparse-plugin-skip", "second, first,") == config.Config("off", frozenset(IDS))
    assert parse("--hisparse-plugin-skip", "") == config.Config("off", frozenset())


def test_settings_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    child: dict[str, str] = {}
    monkeypatch.setenv(config.TRACE_LAYERS_VARIABLE, " 7, 3,7")
    flags = ("strict", "-skip=second", "-log-interval=86400", "-trace=/some where")
    settings = parse("--hisparse-plugin", *(f"--hisparse-plugin{flag}" if flag[0] == "-" else flag for flag in flags))
    settings.export(child)
    assert {*child} == {*VARIABLES} - {config.PLUGINS_VARIABLE}
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    expected = config.Config("strict", frozenset({"second"}), 86400.0, "/some where", (3, 7))
    assert settings == expected == config.read(IDS)


def test_bad_values_name_the_choices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--hisparse-plugin", "maybe")
    assert "auto" in capsys.readouterr().err
    with pytest.raises(
        config.ConfigError, match="--hisparse-plugin-skip: no overlay is called third; there are first, second"
    ):
        parse("--hisparse-plugin-skip", "first,third")
    monkeypatch.setenv(config.MODE_VARIABLE, "maybe")
    with pytest.raises(config.ConfigError, match=f"{config.MODE_VARIABLE}: 'maybe' is not one of auto, strict, off"):
        config.read(IDS)
    monkeypatch.setenv(config.MODE_VARIABLE, "auto")
    monkeypatch.setenv(config.SKIP_VARIABLE, "third")
    with pytest.raises(config.ConfigError, match=config.SKIP_VARIABLE):
        config.read(IDS)


INTERVALS = ("foo", "-1", "0.5", "nan", "inf", "1e9", "5s")
LAYERS = ("foo", "1,x", "-1", "1.5", "0;3")


@pytest.mark.parametrize("value", INTERVALS)
def test_a_bad_interval(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(config.FlagError, match=r"--hisparse-plugin-log-interval: .* 0 for never, or 1 to 86400"):
        parse(f"--hisparse-plugin-log-interval={value}")
    monkeypatch.setenv(config.LOG_VARIABLE, value)
    assert parse("--hisparse-plugin-log-interval=7").log_interval == 7
    complained(monkeypatch, config.LOG_VARIABLE, lambda settings: settings.log_interval == 0)


@pytest.mark.parametrize("value", LAYERS)
def test_bad_layers(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.TRACE_LAYERS_VARIABLE, value)
    assert parse().complaints == (), "nobody asked for a trace"
    monkeypatch.setenv(config.TRACE_VARIABLE, "/folder")
    complained(monkeypatch, config.TRACE_LAYERS_VARIABLE, lambda settings: settings.trace_dir == "")


def complained(monkeypatch: pytest.MonkeyPatch, variable: str, without: Callable[[config.Config], bool]) -> None:
    """Auto goes on without what the variable asks for, strict does not, and off does not look."""
    settings = parse()
    assert len(settings.complaints) == 1 and settings.complaints[0].startswith(f"{variable}: ")
    assert without(settings)
    with pytest.raises(config.ConfigError, match=variable):
        parse("--hisparse-plugin=strict")
    assert parse("--hisparse-plugin=off").complaints == ()
    settings.export(child := dict[str, str]())
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert config.read(IDS).complaints == (), "the user is told once"


def test_which_repairs_run_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.SKIP_VARIABLE, "frist")
    with pytest.raises(config.ConfigError, match="no overlay is called frist"):
        parse()
    assert parse("--hisparse-plugin=off") == config.Config("off")
    assert parse("--hisparse-plugin-skip=first") == config.Config("auto", frozenset({"first"}))


@pytest.mark.parametrize(("value", "allowed"), [("", True), ("hisparse", True), ("a, hisparse", True), ("a,b", False)])
def test_sglangs_whitelist(monkeypatch: pytest.MonkeyPatch, value: str, allowed: bool) -> None:
    monkeypatch.setenv(config.PLUGINS_VARIABLE, value)
    assert config.allowed_by_sglang() is allowed
