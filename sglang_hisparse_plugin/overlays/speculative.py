"""HiSparse serves under speculative decoding."""

from __future__ import annotations

from typing import Any

from .. import upstream
from ..patching.outcome import Defective, Fixed, Verdict
from ..patching.overlay import Hook, Overlay
from ..patching.source import SourceTree
from ..speculative import hooks as around
from .probing import expect, expect_plain, probe

#: What is hooked, wherever it is: (hook, its places by release; it is hooked in the first that there is).
TARGETS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (around.initialize, ("sglang.srt.model_executor.model_runner:ModelRunner.initialize",)),
    (around.init_pools, ("sglang.srt.model_executor.model_runner_kv_cache_mixin:ModelRunnerKVCacheMixin._init_pools",)),
    (around.coordinator_init, (f"{upstream.COORDINATOR}:HiSparseCoordinator.__init__",)),
    (around.alloc_device_buffer, (f"{upstream.COORDINATOR}:HiSparseCoordinator.alloc_device_buffer",)),
    (around.collect_ready_reqs, (f"{upstream.COORDINATOR}:HiSparseCoordinator.collect_ready_reqs",)),
    (around.request_finished, (f"{upstream.COORDINATOR}:HiSparseCoordinator.request_finished",)),
    (
        around.process_batch_result_prefill,
        tuple(f"{module}:{owner}.process_batch_result_prefill" for module, owner in upstream.RESULT_PROCESSORS),
    ),
    (around.build_decode_batch, (f"{upstream.SCHEDULER}:Scheduler._build_hisparse_decode_batch",)),
    (around.check_decode_mem, (f"{upstream.BATCH}:ScheduleBatch.check_decode_mem",)),
    (
        around.prepare_for_decode,
        (
            "sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",
            "sglang.srt.speculative.eagle_info_v2:EagleDraftInputV2Mixin.prepare_for_decode",
        ),
    ),
    (around.forward_batch_generation, ("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",)),
    (
        around.forward_extend,
        (
            "sglang.srt.layers.attention.nsa_backend:NativeSparseAttnBackend.forward_extend",
            "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend.forward_extend",
        ),
    ),
    (
        around.get_indexer_metadata,
        (
            "sglang.srt.layers.attention.nsa_backend:NativeSparseAttnBackend.get_indexer_metadata",
            "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend.get_indexer_metadata",
        ),
    ),
)
#: The same for what only releases that still have spec v1 have, up to 0.5.12.
TARGETS_V1 = (
    (around.draft_v1, "sglang.srt.speculative.eagle_worker:EAGLEWorker._draft_preprocess_decode"),
    (around.verify_v1, "sglang.srt.speculative.eagle_worker:EAGLEWorker.verify"),
)


@probe
def judge(tree: SourceTree) -> Verdict:
    if upstream.coordinator_method(tree, "prepare_spec_verify"):
        return Fixed("the coordinator serves speculative decoding itself")
    missing = [places[-1] for _hook, places in TARGETS if not any(_function(tree, place) for place in places)]
    expect(not missing, "the functions that speculation and HiSparse meet in", f"no {', no '.join(missing)}")
    return Defective("nothing tells the coordinator of draft tokens, and the draft runner builds a HiSparse pool too")


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    found = [(hook, next(place for place in places if _function(tree, place))) for hook, places in TARGETS]
    found += [(hook, place) for hook, place in TARGETS_V1 if _function(tree, place)]
    return tuple(Hook(place, hook) for hook, place in found)


def _function(tree: SourceTree, place: str) -> Any:
    module, _, name = place.partition(":")
    function = tree.function(module, name) if tree.has_module(module) else None
    if function:
        expect_plain(function)
    return function


OVERLAY = Overlay(
    id="speculative",
    symptom="--enable-hisparse with --speculative-algorithm does not start, or decodes from the wrong rows",
    why=(
        "A verification is several queries of a request at once. SGLang translates their positions by a table that "
        "knows rows only while a prompt is prefilled, allocates device rows for draft tokens and never backs them up; "
        "the draft runner builds a second HiSparse pool, which nobody maps. The hooks give draft tokens the extra page "
        "of the request's buffer, answer their queries with the swap-in op, and copy their rows to where accepted "
        "tokens belong; the draft runner gets a plain pool (speculative/)."
    ),
    loses="HiSparse cannot be served with speculative decoding on this release; 0.5.23 can by itself",
    rows=("draft-runner",),
    origin="sgl-project/sglang#23153, #22411, #24085, #26445",
    remove_when="0.5.22 is the oldest supported release",
    fixed_since="0.5.22",
    requires=("retract-once",),
    no_diff="the code lives in this package (speculative/), not in SGLang's files",
    probe=judge,
    hooks=hooks,
)
