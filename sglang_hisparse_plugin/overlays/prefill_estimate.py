"""A prefill takes the pages it needs, and is not asked for one more for each prompt."""

from __future__ import annotations

import ast
from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from .meanwhile import meanwhile
from .probing import existing, expect, expect_hookable, probe

ESTIMATE = "extend_num_tokens + len(seq_lens) * self.page_size"
LENGTHS = ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu")
COUNTED = {"seq_lens": "seq_lens_cpu", "page_size": "self.page_size", "prefix_lens": "prefix_lens_cpu"}


@probe
def judge(tree: SourceTree) -> Verdict:
    extend = existing(upstream.allocator_method(tree, "alloc_extend"), "HiSparseTokenToKVPoolAllocator.alloc_extend")
    counts = extend.calls("get_num_new_pages")
    estimates = [
        node for node in ast.walk(extend.node) if isinstance(node, ast.BinOp) and ast.unparse(node) == ESTIMATE
    ]
    expect(
        len(counts) + len(estimates) == 1,
        f"get_num_new_pages or {ESTIMATE}, once",
        f"{len(counts)} of the one and {len(estimates)} of the other",
    )
    if counts:
        given = {str(keyword.arg): ast.unparse(keyword.value) for keyword in counts[0].keywords}
        expect(given == COUNTED and not counts[0].args, f"new pages of {COUNTED}", ast.unparse(counts[0]))
        return Fixed("alloc_extend counts new pages")
    expect_hookable(extend, "self", *LENGTHS, more=True)
    looks = [ast.unparse(call) for call in extend.calls("available_size")]
    expect(looks == ["self.available_size()"], "one look at what is free, self.available_size()", "; ".join(looks))
    return Defective("alloc_extend wants a free page more for each prompt than it takes")


def alloc_extend(original: Any, allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """Each pool has the new pages, or nothing is taken; lengths are (requests,) int64."""
    lengths = dict(zip(LENGTHS, args, strict=False)) | kwargs
    before, after = lengths["prefix_lens_cpu"], lengths["seq_lens_cpu"]
    page = allocator.page_size
    new_pages = (after + page - 1) // page - (before + page - 1) // page
    if int(new_pages.sum()) * page > allocator.available_size():
        return None
    # The allocator as a whole says that it has room for any estimate; its two pools still say what they have.
    with meanwhile(allocator, available_size=lambda: float("inf")):
        return original(allocator, *args, **kwargs)


OVERLAY = Overlay(
    id="prefill-estimate",
    symptom='"Prefill out of memory" ends the server although the pools have room for the prompts',
    why=(
        "alloc_extend of HiSparse's allocator wants the new tokens and a page more for each prompt to be free, though "
        "it takes only whole new pages. Admission does not reckon with that page for the last prompt of a batch (with "
        "admission-memory, for any), so prompts that fill the last pages are admitted, and the estimate ends the "
        "scheduler. The hook counts the new pages, and has the original find its estimate satisfied when both pools "
        "have them."
    ),
    loses="prompts that fill the last pages of the device pool end the server",
    rows=("prefill-estimate",),
    origin="sgl-project/sglang, between 0.5.10.post1 and 0.5.11",
    remove_when="0.5.11 is the oldest supported release",
    fixed_since="0.5.11",
    probe=judge,
    hooks=lambda tree: (Hook(existing(upstream.allocator_method(tree, "alloc_extend"), "").target, alloc_extend),),
)
