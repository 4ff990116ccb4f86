"""Flags, their environment twins, and what is refused."""

from __future__ import annotations

import argparse

import pytest

from sglang_hisparse_plugin import config

IDS = ("first", "second")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (config.MODE_VARIABLE, config.SKIP_VARIABLE, config.PLUGINS_VARIABLE):
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
    parse("--hisparse-plugin", "strict", "--hisparse-plugin-skip", "second").export(child)
    for name, value in child.items():
        monkeypatch.setenv(name, value)
    assert config.read(IDS) == config.Config("strict", frozenset({"second"}))


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


@pytest.mark.parametrize(("value", "allowed"), [("", True), ("hisparse", True), ("a, hisparse", True), ("a,b", False)])
def test_sglangs_whitelist(monkeypatch: pytest.MonkeyPatch, value: str, allowed: bool) -> None:
    monkeypatch.setenv(config.PLUGINS_VARIABLE, value)
    assert config.allowed_by_sglang() is allowed
