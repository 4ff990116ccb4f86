"""What would end a server after its weights are loaded, or later, ends it when its arguments are read, in one line.

It looks at arguments alone: what it cannot tell from them is left to SGLang and, for `sglang.Engine`, which reads no
command line, to the hooks of the overlays.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from . import config, installation, refusals, upstream
from .overlays import OVERLAYS, speculative, speculative_guard
from .patching import engine
from .patching.outcome import Applied, Defective, Fixed, Refused
from .speculative import limits, room

logger = logging.getLogger(__name__)

PAGE = 64  #: tokens of a page, with HiSparse
NUMBERS: dict[str, Any] = {
    "top_k": 2048,
    "device_buffer_size": None,
    "host_to_device_ratio": 2,
}  #: and SGLang's defaults
RESOLVE = "resolve_once"  #: of ServerArgs from 0.5.19 on; before, they are what they mean once they are built
EXAMPLE = "write it in single quotes, as in --hisparse-config '{\"device_buffer_size\": 4096}'"


def from_cli_args(original: Any, cls: Any, namespace: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ServerArgs.from_cli_args`: what is given first, for SGLang may stumble over it; then what it means."""
    _check(namespace, lambda: _flags(namespace))
    server_args = original(cls, namespace, *args, **kwargs)
    if not hasattr(server_args, RESOLVE):
        _check(server_args, lambda: _decided(server_args))
    return server_args


def resolve_once(original: Any, server_args: Any) -> Any:
    """Around `ServerArgs.resolve_once`, where releases from 0.5.19 on make of arguments what they mean."""
    if upstream.is_resolved(server_args):
        return original(server_args)
    _check(server_args, lambda: _flags(server_args))
    result = original(server_args)
    _check(server_args, lambda: _decided(server_args))
    return result


def scheduler_init(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `Scheduler.__init__`: the same for an engine, and what was left out by name."""
    _check(server_args, lambda: _decided(server_args))
    if getattr(server_args, "enable_hisparse", False) and not _off():
        for warning in left_out(server_args):
            logger.warning("HiSparse plugin: %s", warning)
        for line in verified_by(server_args):
            logger.info("HiSparse plugin: %s", line)
    return original(scheduler, server_args, *args, **kwargs)


def hisparse_config(text: str | None, selected: int | None = None) -> Iterator[str]:
    """What is wrong with the value of --hisparse-config; `selected`: tokens that a query of the model selects."""
    try:
        given = json.loads(text) if text else {}
    except ValueError:
        given = None
    if not isinstance(given, dict):
        yield f"--hisparse-config is no JSON object: {text}: {EXAMPLE}"
        return
    wrong = [name for name in NUMBERS if name in given and (type(given[name]) is not int or given[name] < 1)]
    for name in wrong:
        yield f"{name} is {json.dumps(given[name])} in --hisparse-config: give a whole number from 1 on"
    if wrong:
        return
    sizes = NUMBERS | given
    least = selected or sizes["top_k"]
    buffer = sizes["device_buffer_size"] or 2 * sizes["top_k"]
    if buffer < least:
        default = ", SGLang's default" if not selected and "top_k" not in given else ""
        yield f"device_buffer_size is {buffer}, less than the top_k of {least}{default}: {_set(least)} or more"
    elif buffer % PAGE:
        yield (
            f"device_buffer_size is {buffer}, no multiple of the page of {PAGE} tokens, and the first long request "
            f"would end the server: {_set(buffer)}"
        )


def left_out(server_args: Any) -> Iterator[str]:
    """What happens to a server that speculates, where the overlay that it needs is not applied."""
    if not limits.asked(upstream.resolved(server_args)):
        return
    tree, planned = installation.find().tree, _plan()
    for overlay in (speculative.OVERLAY, speculative_guard.OVERLAY):
        outcome = planned[overlay.id]
        if not isinstance(outcome, Applied) and isinstance(overlay.probe(tree), Defective):
            why = outcome.evidence if isinstance(outcome, Refused) else outcome.reason
            yield f"overlay {overlay.id}, which speculation needs, is not applied ({why}): {overlay.loses}"


def verified_by(server_args: Any) -> Iterator[str]:
    """Whose kernel swaps in for SGLang's own verification."""
    view = upstream.resolved(server_args)
    if limits.asked(view) and not _serves() and _sglang_serves():
        _, asked = _model_and_sizes(server_args, view)
        yield room.verifier(asked, applied=isinstance(_plan()[limits.SWAP_IN], Applied))


def _flags(given: Any, *, resolved: bool = False) -> Iterator[str]:
    """What can be told without the model."""
    yield from hisparse_config(getattr(given, "hisparse_config", None))
    yield from map(str, refusals.problems(given, lambda: refusals.takes_tokens(installation.find().tree)))
    if not limits.asked(given):
        return
    if _serves():
        yield from limits.prefixed(limits.arguments(given, resolved=resolved))
    elif isinstance(_plan()[speculative_guard.OVERLAY.id], Applied):
        yield str(limits.NOT_HERE)
    elif _sglang_serves():
        yield from limits.prefixed(limits.of_sglang(given, resolved=resolved))


def _decided(server_args: Any) -> Iterator[str]:
    """What is wrong with what SGLang has made of the arguments; the model's configuration tells the rest."""
    view = upstream.resolved(server_args)
    wrong = [*_flags(view, resolved=True)]
    yield from wrong
    by_plugin = _serves()
    if wrong or not limits.asked(view) or not (by_plugin or _sglang_serves()):
        return
    names, asked = _model_and_sizes(server_args, view)
    yield from limits.prefixed(
        [
            *hisparse_config(view.hisparse_config, asked.top_k),
            *limits.model(view, names, finds_v32=not by_plugin or upstream.finds_next_token_layer(limits.V32)),
            *(room.sizes(asked) if by_plugin else room.sizes_of_sglang(asked)),
        ]
    )


def _model_and_sizes(server_args: Any, view: Any) -> tuple[Iterable[str], room.Sizes]:
    """The model's architectures, and what is asked of the pools; `view`: the arguments as SGLang has made them."""
    numbers = NUMBERS | json.loads(view.hisparse_config or "{}")
    names, top_k = upstream.model_and_top_k(server_args, installation.find().tree, numbers["top_k"])
    return names, _asked(view, top_k, numbers["device_buffer_size"] or 2 * numbers["top_k"])


def _asked(server_args: Any, top_k: int, hot_buffer: int) -> room.Sizes:
    """Slots and rows are known where both are given; each rank of DP attention has its share of slots."""
    slots, rows = server_args.max_running_requests, server_args.max_total_tokens
    # From 0.5.22 on SGLang makes this one of --dp-size and --enable-dp-attention.
    ranks = getattr(server_args, "attn_dp_size", None)
    ranks = ranks or (server_args.dp_size if server_args.enable_dp_attention else 1)
    return room.Sizes(
        server_args.speculative_num_draft_tokens or 0,
        top_k,
        hot_buffer,
        PAGE,
        slots and max(1, slots // ranks),
        rows and rows // PAGE * PAGE,
    )


def _serves() -> bool:
    """Whether the plugin makes speculation possible."""
    return isinstance(_plan()[speculative.OVERLAY.id], Applied)


@functools.cache
def _sglang_serves_at(found: installation.Installation) -> bool:
    return isinstance(speculative.OVERLAY.probe(found.tree), Fixed)


def _sglang_serves() -> bool:
    return _sglang_serves_at(installation.find())


def _plan() -> engine.Plan:
    return _plan_of(installation.find(), frozenset(config.skipped()))


@functools.cache
def _plan_of(found: installation.Installation, skipped: frozenset[str]) -> engine.Plan:
    """Of what decides who speculates and with which kernel, and what that requires."""
    wanted = {speculative.OVERLAY.id, speculative_guard.OVERLAY.id, *speculative.OVERLAY.requires, limits.SWAP_IN}
    return engine.plan([overlay for overlay in OVERLAYS if overlay.id in wanted], found.tree, skipped)


def _off() -> bool:
    try:
        return config.read([overlay.id for overlay in OVERLAYS]).mode == "off"
    except config.ConfigError:  # ends the server elsewhere
        return True


def _check(given: Any, problems: Callable[[], Iterable[str]]) -> None:
    """End the process if there are any, unless HiSparse or the plugin is off."""
    if not getattr(given, "enable_hisparse", False) or _off():
        return
    found = list(problems())
    if found:
        print(f"HiSparse plugin: {'; '.join(found)}", file=sys.stderr, flush=True)
        raise SystemExit(1)


def _set(tokens: int) -> str:
    return f"set it to {-(-tokens // PAGE) * PAGE} in --hisparse-config"
