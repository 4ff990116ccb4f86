"""The plugin's two doors into an SGLang process, and what happens behind them: probe, plan, apply, verify, report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import wrapt

from . import __version__, config, installation, launch_check, upstream
from .observe import start as observe
from .observe.request import unusable
from .overlays import OVERLAYS
from .patching import engine
from .patching.hooker import Hooker, RegistryHooker, Shim, WraptHooker
from .patching.outcome import Applied, Outcome, Refused, Skipped

logger = logging.getLogger(__name__)

ids = tuple(overlay.id for overlay in OVERLAYS)
ledger = engine.Ledger()

ARGUMENTS = "sglang.srt.server_args"
SCHEDULER = "sglang.srt.managers.scheduler"
LABELS = {Applied: "applied", Skipped: "skipped", Refused: "refused"}


def register() -> None:
    """Entry point of SGLang's plugin loader (0.5.11 and later), which applies the hooks once all plugins ran."""
    _open(_registry_hooker())


def activate() -> None:
    """Entry from `_bootstrap` on releases without a loader: wraps each module as soon as it is imported."""
    try:
        sglang = installation.find()
    except installation.NotInstalled:  # somebody looked for it in vain
        return
    if config.allowed_by_sglang() and not sglang.has_loader:
        _open(WraptHooker())


def _open(hooker: Hooker) -> None:
    """Flags go in wherever arguments are parsed, overlays wherever a scheduler can be built."""
    _when_imported(ARGUMENTS, hooker, _hook_arguments)
    _when_imported(SCHEDULER, hooker, _hook_scheduler)


def _when_imported(module: str, hooker: Hooker, install: Callable[[Hooker], None]) -> None:
    """Now, if the module is there; else after its import, and then by wrapping: a registry has been applied by then."""
    if module in sys.modules:
        _try(install, hooker)
    else:
        wrapt.register_post_import_hook(lambda _module: _try(install, WraptHooker()), module)


def _try(install: Callable[[Hooker], None], hooker: Hooker) -> None:
    """Our own doors are no overlays: without them there is no flag, or nobody checks, and the user must know."""
    try:
        install(hooker)
    except Exception as error:
        message = f"this SGLang is laid out in a way the plugin does not know: {error}; HiSparse runs without its fixes"
        if _settings().mode == "strict":
            _stop(message)
        logger.warning("HiSparse plugin: %s", message)


def _hook_arguments(hooker: Hooker) -> None:
    for name, shim in (("add_cli_args", _add_cli_args), ("from_cli_args", _checked_from_cli_args)):
        _install_once(hooker, f"{ARGUMENTS}:ServerArgs.{name}", shim)
    if hasattr(sys.modules[ARGUMENTS].ServerArgs, launch_check.RESOLVE):
        _install_once(hooker, f"{ARGUMENTS}:ServerArgs.{launch_check.RESOLVE}", launch_check.resolve_once)


def _hook_scheduler(hooker: Hooker) -> None:
    """Apply the overlays; what became of them is judged when a `Scheduler` is built with HiSparse on."""
    try:
        settings = config.read(ids)
    except config.ConfigError:  # matters to a server with HiSparse alone, which says so and ends
        _install_once(hooker, f"{SCHEDULER}:Scheduler.__init__", _scheduler_init)
        return
    if settings.mode == "off":
        return
    tree = installation.find().tree
    engine.apply(OVERLAYS, tree, engine.plan(OVERLAYS, tree, settings.skip), lambda _target: hooker, ledger)
    _install_once(hooker, f"{SCHEDULER}:Scheduler.__init__", _checked_scheduler_init)


def _add_cli_args(original: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
    result = original(parser, *args, **kwargs)
    config.add_flags(parser)
    return result


def _checked_from_cli_args(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _from_cli_args(functools.partial(launch_check.from_cli_args, original), *args, **kwargs)


def _checked_scheduler_init(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _scheduler_init(functools.partial(launch_check.scheduler_init, original), *args, **kwargs)


def _from_cli_args(original: Any, cls: Any, namespace: argparse.Namespace, *args: Any, **kwargs: Any) -> Any:
    """Read the flags, leave them to the children, and in strict mode stop here, before a model is loaded."""
    serves = bool(getattr(namespace, "enable_hisparse", False))
    try:
        settings = config.take_flags(namespace, ids)
    except config.ConfigError as error:
        if serves or isinstance(error, config.FlagError):
            _stop(str(error), code=2)
        return original(cls, namespace, *args, **kwargs)
    if settings.mode == "off":
        _unheard(settings, "--hisparse-plugin is off")
    for complaint in settings.complaints if serves else ():
        logger.warning("HiSparse plugin: %s", complaint)
    settings.export()
    if settings.mode == "strict" and serves:
        _enforce(settings, engine.plan(OVERLAYS, installation.find().tree, settings.skip))
    return original(cls, namespace, *args, **kwargs)


def _unheard(settings: config.Config, why: str) -> None:
    """Say that there will be nothing to observe, if that was asked for."""
    if settings.observes:
        logger.warning("HiSparse plugin: %s, so there is neither a log line nor a trace of it", why)


def _scheduler_init(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    first = upstream.tp_rank(installation.find().tree, (server_args, *args), kwargs) == 0
    if not getattr(server_args, "enable_hisparse", False):
        with contextlib.suppress(config.ConfigError):
            if first:
                _unheard(config.read(ids), "there is no --enable-hisparse")
        return original(scheduler, server_args, *args, **kwargs)
    settings = _settings()
    engine.verify(OVERLAYS, ledger)
    for level, line in report(ledger.outcomes, settings):
        logger.log(level if first else logging.DEBUG, line)
    _enforce(settings, ledger.outcomes)
    if not isinstance(ledger.outcomes.get("observe"), Applied):
        if first:
            _unheard(settings, "overlay observe is not applied")
        return original(scheduler, server_args, *args, **kwargs)
    observe.prepare(server_args, settings, first)
    result = original(scheduler, server_args, *args, **kwargs)
    observe.start(scheduler, {name: LABELS[type(o)] for name, o in ledger.outcomes.items()})
    return result


def report(outcomes: engine.Plan, settings: config.Config) -> list[tuple[int, str]]:
    """Log level and text of the start log: a headline, then a line per overlay."""
    count = {label: sum(isinstance(o, kind) for o in outcomes.values()) for kind, label in LABELS.items()}
    headline = (
        f"HiSparse plugin {__version__} on SGLang {installation.find().version}, mode {settings.mode}: "
        + ", ".join(f"{n} {label}" for label, n in count.items())
    )
    lines = [(logging.INFO, headline)]
    for overlay, outcome in outcomes.items():
        level = logging.WARNING if isinstance(outcome, Refused) else logging.INFO
        lines.append((level, f"HiSparse overlay {overlay}: {describe(outcome)}"))
    return lines + [(logging.WARNING, f"HiSparse plugin: {complaint}") for complaint in settings.complaints]


def describe(outcome: Outcome) -> str:
    """An outcome in one sentence."""
    text = f"{LABELS[type(outcome)]}: {outcome.reason}"
    return f"{text} ({outcome.evidence})" if isinstance(outcome, Refused) else text


def _enforce(settings: config.Config, outcomes: engine.Plan) -> None:
    if settings.mode != "strict":
        return
    refused = [f"{name} {describe(outcome)}" for name, outcome in outcomes.items() if isinstance(outcome, Refused)]
    if refused:
        _stop(
            "--hisparse-plugin strict: "
            + "; ".join(refused)
            + ". Use a known SGLang release, --hisparse-plugin auto to "
            "go on without, or --hisparse-plugin-skip to leave out by name."
        )
    if settings.trace_dir and (reason := unusable(Path(settings.trace_dir))):
        _stop(f"--hisparse-plugin strict: no trace can be recorded: {reason}")


def _settings() -> config.Config:
    try:
        return config.read(ids)
    except config.ConfigError as error:
        _stop(str(error), code=2)


def _stop(reason: str, code: int = 1) -> NoReturn:
    """End the process. SGLang's loader swallows every `Exception`, so this is a `SystemExit`."""
    print(f"HiSparse plugin: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _install_once(hooker: Hooker, target: str, shim: Shim) -> None:
    if (target, shim) not in _installed:
        hooker.install(target, shim)
        _installed.add((target, shim))


_installed: set[tuple[str, Shim]] = set()


def _registry_hooker() -> Hooker:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    return RegistryHooker(lambda target, shim: HookRegistry.register(target, shim, HookType.AROUND))
