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
LOG_VARIABLE = "SGLANG_HISPARSE_PLUGIN_LOG_INTERVAL"
TRACE_VARIABLE = "SGLANG_HISPARSE_PLUGIN_TRACE"
TRACE_LAYERS_VARIABLE = "SGLANG_HISPARSE_PLUGIN_TRACE_LAYERS"
PLUGINS_VARIABLE = "SGLANG_PLUGINS"
PLUGIN_NAME = "hisparse"


class ConfigError(ValueError):
    """A setting has no meaning; the text names the choices."""


@dataclass(frozen=True)
class Config:
    """How the plugin behaves in this process and, through the environment, in its children."""

    mode: str = "auto"
    skip: frozenset[str] = frozenset()
    log_interval: float = 0.0
    """Seconds between two log lines of what HiSparse did; 0: none."""
    trace_dir: str = ""
    """Folder in which traces can be asked for and are written; empty: none can."""

    def export(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Leave the settings to child processes."""
        environment[MODE_VARIABLE] = self.mode
        environment[SKIP_VARIABLE] = ",".join(sorted(self.skip))
        environment[LOG_VARIABLE] = f"{self.log_interval:g}"
        environment[TRACE_VARIABLE] = self.trace_dir


@dataclass(frozen=True)
class Observation:
    """What is to be observed in this process."""

    metrics: bool
    log_interval: float
    trace_dir: str
    trace_layers: tuple[int, ...]
    """Layers that are recorded; empty: a few, evenly spread."""

    @property
    def counts(self) -> bool:
        """Whether anybody reads the swap-in's counters."""
        return self.metrics or self.log_interval > 0


def observation(metrics: bool) -> Observation:
    """What is to be observed, from the environment, where `Config.export` leaves what flags said.

    Args:
        metrics: whether the server exports metrics (``--enable-metrics``).

    Raises:
        ConfigError: a number is none.
    """
    layers = os.environ.get(TRACE_LAYERS_VARIABLE, "")
    try:
        wanted = tuple(sorted({int(layer) for layer in layers.split(",") if layer.strip()}))
    except ValueError:
        raise ConfigError(f"{TRACE_LAYERS_VARIABLE}: '{layers}' is no list of layers such as 0,30,60") from None
    interval = _seconds(os.environ.get(LOG_VARIABLE, ""), LOG_VARIABLE)
    return Observation(metrics, interval, os.environ.get(TRACE_VARIABLE, ""), wanted)


def read(
    ids: Collection[str],
    mode: str | None = None,
    skip: str | None = None,
    log_interval: str | None = None,
    trace: str | None = None,
) -> Config:
    """Settings from flag values; where a flag was not given, from the environment; else the defaults.

    Raises:
        ConfigError: an unknown mode, an id in the skip list that is not one of `ids`, or an interval that is none.
    """
    mode_source, skip_source = "--hisparse-plugin", "--hisparse-plugin-skip"
    if mode is None:
        mode_source, mode = MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "auto"
    if skip is None:
        skip_source, skip = SKIP_VARIABLE, os.environ.get(SKIP_VARIABLE, "")
    interval_source = "--hisparse-plugin-log-interval"
    if log_interval is None:
        interval_source, log_interval = LOG_VARIABLE, os.environ.get(LOG_VARIABLE, "")
    if trace is None:
        trace = os.environ.get(TRACE_VARIABLE, "")
    if mode not in MODES:
        raise ConfigError(f"{mode_source}: '{mode}' is not one of {', '.join(MODES)}")
    skipped = frozenset(_parse_skip(skip, skip_source, ids))
    return Config(mode, skipped, _seconds(log_interval, interval_source), trace)


def skipped() -> frozenset[str]:
    """Overlays this process leaves out, from the environment, where `Config.export` has checked and left them."""
    return frozenset(name.strip() for name in os.environ.get(SKIP_VARIABLE, "").split(",") if name.strip())


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
        help="Log hit rate, pools and retractions every so many seconds; 0: never. "
        f"Default: 0, or the environment variable {LOG_VARIABLE}.",
    )
    group.add_argument(
        "--hisparse-plugin-trace",
        metavar="DIR",
        default=None,
        help="Let `sglang-hisparse explore --record DIR` record which tokens the model selects. "
        f"Default: none, or the environment variable {TRACE_VARIABLE}.",
    )


def take_flags(namespace: argparse.Namespace, ids: Collection[str]) -> Config:
    """Settings from parsed arguments; the plugin's own attributes are removed from `namespace`.

    Raises:
        ConfigError: as `read`.
    """
    values = {name: vars(namespace).pop(f"hisparse_plugin{suffix}", None) for name, suffix in _FLAGS}
    return read(ids, **values)


_FLAGS = (("mode", ""), ("skip", "_skip"), ("log_interval", "_log_interval"), ("trace", "_trace"))


def _seconds(text: str, source: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{source}: '{text}' is no number of seconds, 0 or more")
    return value


def _parse_skip(text: str, source: str, ids: Collection[str]) -> Iterable[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in ids]
    if unknown:
        raise ConfigError(f"{source}: no overlay is called {', '.join(unknown)}; there are {', '.join(ids)}")
    return wanted
