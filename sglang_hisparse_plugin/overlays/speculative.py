"""HiSparse serves under speculative decoding."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .. import upstream
from ..patching.outcome import Absent, Defective, Fixed, Verdict
from ..patching.overlay import Around, Hook, Overlay
from ..patching.source import FunctionSource, SourceTree
from ..speculative import hooks as around
from .probing import existing, expect, expect_hookable, probe

BACKENDS = (
    "sglang.srt.layers.attention.nsa_backend:NativeSparseAttnBackend",
    "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend",
)
POOLS = "sglang.srt.model_executor.model_runner_kv_cache_mixin:ModelRunnerKVCacheMixin._init_pools"
#: Where pools are built from 0.5.16 on.
CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._init_pools"


@dataclass(frozen=True)
class Target:
    """What is hooked: the first of `places` that there is, which takes `names` by position and, if `more`, others."""

    around: Around
    names: tuple[str, ...]
    places: tuple[str, ...]
    more: bool = False


def _coordinator(hook: Around, *names: str) -> Target:
    return Target(hook, ("self", *names), (f"{upstream.COORDINATOR}:HiSparseCoordinator.{hook.__name__}",))


TARGETS: tuple[Target, ...] = (
    Target(around.initialize, ("self",), ("sglang.srt.model_executor.model_runner:ModelRunner.initialize",), more=True),
    Target(around.init_pools, ("self",), (POOLS,)),
    Target(
        around.coordinator_init,
        ("self", "req_to_token_pool", "token_to_kv_pool_allocator", "top_k", "device_buffer_size"),
        (f"{upstream.COORDINATOR}:HiSparseCoordinator.__init__",),
        more=True,
    ),
    _coordinator(around.alloc_device_buffer, "req"),
    _coordinator(around.collect_ready_reqs),
    _coordinator(around.request_finished, "req"),
    Target(
        around.process_batch_result_prefill,
        ("self", "batch", "result"),
        tuple(f"{module}:{owner}.process_batch_result_prefill" for module, owner in upstream.RESULT_PROCESSORS),
    ),
    Target(
        around.build_decode_batch, ("self", "reqs"), (f"{upstream.SCHEDULER}:Scheduler._build_hisparse_decode_batch",)
    ),
    Target(around.check_decode_mem, ("self",), (f"{upstream.BATCH}:ScheduleBatch.check_decode_mem",), more=True),
    Target(
        around.forward_batch_generation,
        ("self",),
        ("sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",),
        more=True,
    ),
    Target(
        around.forward_extend,
        ("self", "q", "k", "v", "layer", "forward_batch"),
        tuple(f"{backend}.forward_extend" for backend in BACKENDS),
        more=True,
    ),
    Target(
        around.get_indexer_metadata,
        ("self", "layer_id", "forward_batch"),
        tuple(f"{backend}.get_indexer_metadata" for backend in BACKENDS),
    ),
)
#: Spec v2 takes its slots in a function of its own from 0.5.15, before that in a method.
SLOTS = (
    Target(around.prepare_for_decode, ("batch",), ("sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",)),
    Target(
        around.prepare_for_decode,
        ("self", "batch"),
        ("sglang.srt.speculative.eagle_info_v2:EagleDraftInputV2Mixin.prepare_for_decode",),
    ),
)
#: What only releases that still have spec v1 have, up to 0.5.12.
V1 = "sglang.srt.speculative.eagle_worker:EAGLEWorker"
TARGETS_V1 = (
    Target(around.draft_v1, ("self", "batch"), (f"{V1}._draft_preprocess_decode",)),
    Target(around.verify_v1, ("self", "batch"), (f"{V1}.verify",), more=True),
)
#: Tables of the coordinator that speculative/rows.py reads and writes.
TABLES = {
    *("top_k", "device_buffer_size", "padded_buffer_size", "num_real_reqs", "mem_pool_device", "mem_pool_host"),
    *("req_to_token_pool", "token_to_kv_pool_allocator", "req_to_device_buffer", "req_device_buffer_size"),
    *("req_to_host_pool", "req_device_buffer_tokens", "req_device_buffer_token_locs", "lru_slots"),
}


@probe
def judge(tree: SourceTree) -> Verdict:
    if upstream.coordinator_method(tree, "prepare_spec_verify"):
        return Fixed("the coordinator serves speculative decoding itself")
    if not _function(tree, POOLS) and _function(tree, CONFIGURATOR):
        return Absent("pools are built where the hooks do not reach; speculative-guard refuses speculation instead")
    found = _targets(tree)
    for target, function in found:
        expect_hookable(function, *target.names, more=target.more)
    by_hook = {target.around: function for target, function in found}
    _expect_tables(by_hook[around.coordinator_init])
    _expect_attention(by_hook[around.forward_extend])
    _expect_indexer(by_hook[around.get_indexer_metadata])
    verifies = by_hook[around.forward_batch_generation]
    expect("is_verify" in verifies.parameters, f"{verifies.qualname}(..., is_verify)", ", ".join(verifies.parameters))
    return Defective("nothing tells the coordinator of draft tokens, and the draft runner builds a HiSparse pool too")


def _targets(tree: SourceTree) -> list[tuple[Target, FunctionSource]]:
    """Everything to hook, with its function.

    Raises:
        Drift: one is missing.
    """
    found = [(target, _first(tree, target)) for target in TARGETS]
    slots = next((target for target in SLOTS if _function(tree, target.places[0])), SLOTS[-1])
    found.append((slots, _first(tree, slots)))
    return found + [(target, _first(tree, target)) for target in TARGETS_V1 if tree.has_module(V1.partition(":")[0])]


def _first(tree: SourceTree, target: Target) -> FunctionSource:
    places = (_function(tree, place) for place in target.places)
    return existing(next((function for function in places if function), None), target.places[-1])


def _function(tree: SourceTree, place: str) -> FunctionSource | None:
    return tree.function(*place.split(":"))


def _expect_tables(init: FunctionSource) -> None:
    """The coordinator has the tables that draft tokens are entered in."""
    nodes = [node for node in ast.walk(init.node) if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in nodes for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    names = {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    expect(names >= TABLES, "tables of the coordinator known here", f"no {', no '.join(sorted(TABLES - names))}")


def _expect_attention(extend: FunctionSource) -> None:
    """Prefill and verification translate once, where the holder of the coordinator that is hooked says so."""
    expect("topk_indices" in extend.parameters, f"{extend.qualname}(..., topk_indices)", ", ".join(extend.parameters))
    calls = extend.calls("translate_loc_to_hisparse_device")
    holders = {f"{holder}.hisparse_coordinator is not None" for holder in ("self", "forward_batch")}
    guards = [guard for call in calls for guard in extend.guards(call)]
    expect(
        len(calls) == 1 and bool(holders & set(guards)),
        "one translation to device rows, if self or forward_batch has a coordinator",
        f"{len(calls)}, if {' and '.join(guards) or 'unconditionally'}",
    )


def _expect_indexer(metadata: FunctionSource) -> None:
    """Whether the top-k is fused is a field of what is returned."""
    returned = [node.value for node in ast.walk(metadata.node) if isinstance(node, ast.Return)]
    calls = [value for value in returned if isinstance(value, ast.Call)]
    keywords = {keyword.arg for call in calls for keyword in call.keywords}
    expect(
        len(returned) == len(calls) == 1 and "force_unfused_topk" in keywords,
        f"one return of {metadata.qualname}, with force_unfused_topk",
        "; ".join(ast.unparse(value) for value in returned if value),
    )


def hooks(tree: SourceTree) -> tuple[Hook, ...]:
    return tuple(Hook(function.target, target.around) for target, function in _targets(tree))


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
    loses="HiSparse cannot be served with speculative decoding on this release; from 0.5.22 SGLang can by itself",
    rows=("draft-runner",),
    origin="sgl-project/sglang#23153, #22411, #24085, #26445",
    remove_when="0.5.22 is the oldest supported release",
    fixed_since="0.5.22",
    requires=("retract-once",),
    no_diff="the code lives in this package (speculative/), not in SGLang's files",
    probe=judge,
    hooks=hooks,
)
