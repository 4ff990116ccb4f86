"""The plugin's settings. The only file that reads its flags and environment variables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass

MODES = {
    "auto": "apply what is known to be right on this SGLang, warn about the rest",
    "strict": "as auto, but stop the server if anything is refused or not in place",
    "off": "touch nothing",
}
MODE_VARIABLE = "SGLANG_HISPARSE_PLUGIN"
SKIP_VARIABLE = "SGLANG_HISPARSE_PLUGIN_SKIP"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
PLUGIN_NAME = "hisparse"


class ConfigError(ValueError):
    """A setting has no meaning; the text names the choices."""


@dataclass(frozen=True)
class Config:
    """How the plugin behaves in this process and, through the environment, in its children."""

    mode: str = "auto"
    skip: frozenset[str] = frozenset()

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Leave the settings to child processes."""
        environment[MODE_VARIABLE] = self.mode
        environment[SKIP_VARIABLE] = ",".join(sorted(self.skip))


def read(ids: Collection[str], mode: str | None = None, skip: str | None = None) -> Config:
    """Settings from flag values; where a flag was not given, from the environment; else the defaults.

    Raises:
        ConfigError: an unknown mode, or an id in the skip list that is not one of `ids`.
    """
    mode_source, skip_source = "--hisparse-plugin", "--hisparse-plugin-skip"
    if mode is None:
        mode_source, mode = MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "auto"
    if skip is None:
        skip_source, skip = SKIP_VARIABLE, os.environ.get(SKIP_VARIABLE, "")
    if mode not in MODES:
        raise ConfigError(f"{mode_source}: '{mode}' is not one of {', '.join(MODES)}")
    return Config(mode, frozenset(_parse_skip(skip, skip_source, ids)))


def allowed_by_sglang() -> bool:
    """Whether SGLang's own whitelist, when set, names this plugin."""
    names = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip()]
    return not names or PLUGIN_NAME in names


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--hisparse-plugin`` and ``--hisparse-plugin-skip``; once, however often called."""
    if "--hisparse-plugin" in parser._option_string_actions:
        return
    group = parser.add_argument_group("HiSparse plugin")
    group.add_argument(
        "--hisparse-plugin",
        choices=MODES,
        default=None,
        help="; ".join(f"{mode}: {meaning}" for mode, meaning in MODES.items())
        + f". Default: auto, or the environment variable {MODE_VARIABLE}.",
    )
    group.add_argument(
        "--hisparse-plugin-skip",
        metavar="ID[,ID...]",
        default=None,
        help="Overlays to leave out; `sglang-hisparse status` lists the ids. "
        f"Default: none, or the environment variable {SKIP_VARIABLE}.",
    )


def take_flags(namespace: argparse.Namespace, ids: Collection[str]) -> Config:
    """Settings from parsed arguments; the plugin's own attributes are removed from `namespace`.

    Raises:
        ConfigError: as `read`.
    """
    values = {name: vars(namespace).pop(f"hisparse_plugin{suffix}", None) for name, suffix in _FLAGS}
    return read(ids, **values)


_FLAGS = (("mode", ""), ("skip", "_skip"))


def _parse_skip(text: str, source: str, ids: Collection[str]) -> Iterable[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ids]
    if unknown:
        raise ConfigError(f"{source}: no overlay is called {', '.join(unknown)}; there are {', '.join(ids)}")
    return wanted
