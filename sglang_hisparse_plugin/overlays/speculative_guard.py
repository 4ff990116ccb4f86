"""Where nothing makes HiSparse serve under speculative decoding, a server with both says so and ends."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Unknown, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..speculative import limits
from ..speculative.problem import Unsupported
from . import speculative
from .probing import existing, expect, expect_hookable, probe

FLAGS = ("enable_hisparse", "speculative_algorithm")


@probe
def judge(tree: SourceTree) -> Verdict:
    served = speculative.judge(tree)
    if isinstance(served, Fixed | Unknown):
        return served
    if isinstance(served, Defective):
        return Absent("overlay speculative serves it")
    init = existing(upstream.scheduler_method(tree, "__init__"), "Scheduler.__init__")
    expect_hookable(init, "self", "server_args", more=True)
    unknown = [flag for flag in FLAGS if not any(tree.mentions(place, flag) for place in upstream.ARGUMENTS)]
    expect(not unknown, "the server arguments " + " and ".join(FLAGS), f"no {', no '.join(unknown)}")
    return Defective("queries of a verification are not swapped in, and the draft runner builds a HiSparse pool too")


def refuse(original: Any, scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Before anything is loaded."""
    if server_args.enable_hisparse and limits.asked(upstream.resolved(server_args)):
        with limits.ends_the_process():
            raise Unsupported(str(limits.NOT_HERE))
    return original(scheduler, server_args, *args, **kwargs)


OVERLAY = Overlay(
    id="speculative-guard",
    symptom="--enable-hisparse with --speculative-algorithm dies while it starts, or decodes from the wrong rows",
    why=(
        "From 0.5.16 to 0.5.21 pools are built in another place, which the hooks of `speculative` do not reach, and "
        "SGLang itself neither swaps in what the queries of a verification select nor gives the draft runner a plain "
        "pool. The hook ends a server with both flags before weights are loaded, and names the releases that serve."
    ),
    loses="a server with both flags is not stopped, and dies while it starts or answers from the wrong rows",
    rows=("draft-runner",),
    origin="sgl-project/sglang#23153, #26445",
    remove_when="0.5.22 is the oldest supported release, or `speculative` reaches 0.5.16 to 0.5.21",
    fixed_since="0.5.22",
    no_diff="it refuses and repairs nothing",
    probe=judge,
    hooks=lambda tree: (Hook(f"{upstream.SCHEDULER}:Scheduler.__init__", refuse),),
)
