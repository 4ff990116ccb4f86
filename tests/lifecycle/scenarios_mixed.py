"""A server with --enable-mixed-chunk, where SGLang does not refuse it."""

from __future__ import annotations

import importlib
import sys

from .scenarios import decoded, finish, scenario
from .world import World


@scenario
def mixed_chunks(w: World) -> None:
    """A prompt of two chunks arrives while two requests decode, one of them at its last tokens."""
    if _refused():
        return w.inapplicable("this release refuses the flag")
    _as_with_the_flag(w)
    w.submit("decodes", prompt=110, output=24)
    w.submit("ends", prompt=120, output=5)
    w.run_until(lambda: decoded(w, 3, "decodes", "ends"))
    w.submit("chunked", prompt=700, output=8)
    w.run_until(lambda: all(w.ends(rid) for rid in w.requests), limit=80)
    finish(w)


class WithTheFlag:
    """SGLang's settings of the schedule, which cannot be written to."""

    def __init__(self, settings) -> None:
        self.settings, self.enable_mixed_chunk = settings, True

    def __getattr__(self, name: str):
        return getattr(self.settings, name)


def _refused() -> bool:
    try:
        hook = importlib.import_module("sglang.srt.arg_groups.hisparse_hook")
    except ModuleNotFoundError:
        return False
    return hasattr(hook, "validate_hisparse_feature_combos")


def _as_with_the_flag(w: World) -> None:
    """Have the scheduler read its arguments again, with the flag among them."""
    module = sys.modules["sglang.srt.managers.scheduler"]
    if hasattr(module, "get_schedule"):  # from 0.5.17
        settings = WithTheFlag(module.get_schedule())
        module.get_schedule = lambda: settings
    else:
        w.scheduler.server_args.enable_mixed_chunk = True
    w.scheduler.init_chunked_prefill()
