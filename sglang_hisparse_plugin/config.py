"""The plugin's settings. The only file that reads its flags and environment variables."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Parse = Callable[[str, str], T]  # from the text and the name of what it stands in; "" for nothing

MODES = {
    "auto": "apply what is known to be right on this SGLang, warn about the rest",
    "strict": "as auto, but stop the server if anything is refused or not in place",
    "off": "touch nothing",
}
MODE_VARIABLE = "SGLANG_HISPARSE_PLUGIN"
SKIP_VARIABLE = "SGLANG_HISPARSE_PLUGIN_SKIP"
LOG_VARIABLE = "SGLANG_HISPARSE_PLUGIN_LOG_INTERVAL"
TRACE_VARIABLE = "SGLANG_HISPARSE_PLUGIN_TRACE"
TRACE_LAYERS_VARIABLE = "SGLANG_HISPARSE_PLUGIN_TRACE_LAYERS"
#: SGLang's own from 0.5.19; heard on every release.
RELEASE_VARIABLE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
PLUGIN_NAME = "hisparse"


LOG_INTERVALS = 1.0, 86400.0  #: seconds, shortest and longest


class ConfigError(ValueError):
    """A setting has no meaning; the text names the choices."""


class FlagError(ConfigError):
    """It stands on the command line."""


@dataclass(frozen=True)
class Config:
    """How the plugin behaves in this process and, through the environment, in its children."""

    mode: str = "auto"
    skip: frozenset[str] = frozenset()
    log_interval: float = 0.0
    """Seconds between two log lines of what HiSparse did; 0: none."""
    trace_dir: str = ""
    """Folder in which traces can be asked for and are written; empty: none can."""
    trace_layers: tuple[int, ...] = ()
    """Layers that are recorded; empty: a few, evenly spread."""
    complaints: tuple[str, ...] = ()
    """Variables without meaning, for which the server goes on without what they ask for."""

    @property
    def observes(self) -> bool:
        """Whether something was asked for that only a server with HiSparse can tell."""
        return self.log_interval > 0 or bool(self.trace_dir)

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Leave the settings to child processes."""
        environment[MODE_VARIABLE] = self.mode
        environment[SKIP_VARIABLE] = ",".join(sorted(self.skip))
        environment[LOG_VARIABLE] = f"{self.log_interval:g}"
        environment[TRACE_VARIABLE] = self.trace_dir
        environment[TRACE_LAYERS_VARIABLE] = ",".join(map(str, self.trace_layers))


def read(
    ids: Collection[str],
    mode: str | None = None,
    skip: str | None = None,
    log_interval: str | None = None,
    trace: str | None = None,
) -> Config:
    """Settings from flag values; where a flag was not given, from the environment; else the defaults.

    A variable that has no meaning ends nothing if mode is off, or if it only asks for something to be observed and mode
    is auto. Which repairs run is never guessed.

    Raises:
        FlagError: a flag has no meaning.
        ConfigError: a variable has none: the mode, an id in the skip list that is not one of `ids`; if strict, any.
    """
    chosen = (
        _parse_mode(mode, "--hisparse-plugin") if mode else _parse_mode(os.environ.get(MODE_VARIABLE), MODE_VARIABLE)
    )
    wrong: list[str] = []

    def setting(given: str | None, flag: str, variable: str, parse: Parse[T], vital: bool = False) -> T:
        try:
            return parse(os.environ.get(variable, ""), variable) if given is None else parse(given, flag)
        except ConfigError as error:
            if given is not None:
                raise FlagError(str(error)) from None
            if vital and chosen != "off":
                raise
            wrong.append(str(error))
            return parse("", variable)

    left_out = setting(
        skip, "--hisparse-plugin-skip", SKIP_VARIABLE, lambda text, source: _parse_skip(text, source, ids), vital=True
    )
    interval = setting(log_interval, "--hisparse-plugin-log-interval", LOG_VARIABLE, _parse_seconds)
    folder = os.environ.get(TRACE_VARIABLE, "") if trace is None else trace
    layers = setting(None, "", TRACE_LAYERS_VARIABLE, _parse_layers) if folder else ()
    if folder and wrong and wrong[-1].startswith(TRACE_LAYERS_VARIABLE):
        folder = ""
    if wrong and chosen == "strict":
        raise ConfigError("; ".join(wrong))
    return Config(chosen, left_out, interval, folder, layers, () if chosen == "off" else tuple(wrong))


def skipped() -> frozenset[str]:
    """Overlays this process leaves out, from the environment, where `Config.export` has checked and left them."""
    return frozenset(name.strip() for name in os.environ.get(SKIP_VARIABLE, "").split(",") if name.strip())


@functools.cache
def release_timeout(default: float) -> float:
    """Seconds for which a PD decode worker keeps what an aborted transfer may still write to."""
    text = os.environ.get(RELEASE_VARIABLE) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds >= 0:
        return seconds
    logging.getLogger(__name__).warning("%s=%r is no number of seconds; it is %g", RELEASE_VARIABLE, text, default)
    return default


def allowed_by_sglang() -> bool:
    """Whether SGLang's own whitelist, when set, names this plugin."""
    names = [name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip()]
    return not names or PLUGIN_NAME in names


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--hisparse-plugin`` and its companions; once, however often called."""
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
    group.add_argument(
        "--hisparse-plugin-log-interval",
        metavar="SECONDS",
        default=None,
        help="Log hit rate, pools and retractions every so many seconds, 1 to 86400, while something happens; 0: "
        f"never. Default: 0, or the environment variable {LOG_VARIABLE}.",
    )
    group.add_argument(
        "--hisparse-plugin-trace",
        metavar="DIR",
        default=None,
        help="Let `sglang-hisparse explore --record DIR` record which tokens the model selects; takes 64 MiB of "
        f"device memory. Default: none, or the environment variable {TRACE_VARIABLE}.",
    )


def take_flags(namespace: argparse.Namespace, ids: Collection[str]) -> Config:
    """Settings from parsed arguments; the plugin's own attributes are removed from `namespace`.

    Raises:
        ConfigError: as `read`.
    """
    values = {name: vars(namespace).pop(f"hisparse_plugin{suffix}", None) for name, suffix in _FLAGS}
    return read(ids, **values)


_FLAGS = (("mode", ""), ("skip", "_skip"), ("log_interval", "_log_interval"), ("trace", "_trace"))


def _parse_mode(text: str | None, source: str) -> str:
    if (text or "auto") not in MODES:
        raise ConfigError(f"{source}: '{text}' is not one of {', '.join(MODES)}")
    return text or "auto"


def _parse_seconds(text: str, source: str) -> float:
    shortest, longest = LOG_INTERVALS
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if value != 0 and not shortest <= value <= longest:
        raise ConfigError(f"{source}: '{text}' is no number of seconds: 0 for never, or {shortest:g} to {longest:g}")
    return value


def _parse_layers(text: str, source: str) -> tuple[int, ...]:
    try:
        layers = {int(layer) for layer in text.split(",") if layer.strip()}
    except ValueError:
        layers = {-1}
    if min(layers, default=0) < 0:
        raise ConfigError(f"{source}: '{text}' is no list of layers such as 0,30,60; no trace can be recorded")
    return tuple(sorted(layers))


def _parse_skip(text: str, source: str, ids: Collection[str]) -> frozenset[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ids]
    if unknown:
        raise ConfigError(f"{source}: no overlay is called {', '.join(unknown)}; there are {', '.join(ids)}")
    return frozenset(wanted)
