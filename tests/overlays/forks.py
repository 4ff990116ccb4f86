"""Small edits of released sources, as a fork might have them, after which a probe must not guess."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = "sglang.srt.managers.schedule_batch"
SCHEDULER = "sglang.srt.managers.scheduler"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator"
OLD, NEW = "0.5.10.post1", "0.5.23"


@dataclass(frozen=True)
class Fork:
    overlay: str
    what: str
    release: str
    module: str
    function: str
    old: str
    """Replaced by `new` where it first stands in the function."""
    new: str
    named: str
    """What the refusal must name."""
    old_too: str = ""
    """Replaced by `new_too` after that."""
    new_too: str = ""


METHOD = "ScheduleBatch.release_req"
NEXT = "Scheduler.get_next_batch_to_run"
FINISHED = "HiSparseCoordinator.request_finished"
MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin"
DECODE = "sglang.srt.disaggregation.decode"
PREBUILT = "SchedulerOutputProcessorMixin.process_batch_result_prebuilt"
DROP = "SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch"
ABORT = "Scheduler.process_pending_chunked_abort"
PAUSE = "Scheduler.pause_generation"
RETRACT = "HiSparseCoordinator.retract_req"
ADMIT = "HiSparseCoordinator.admit_request_direct"
SPEC, GUARD = "0.5.15", "0.5.20"
BATCH_WORKER = "sglang.srt.managers.tp_worker"
ATTENTION = "sglang.srt.layers.attention.dsa_backend"
EXTEND, INDEXER = "DeepseekSparseAttnBackend.forward_extend", "DeepseekSparseAttnBackend.get_indexer_metadata"
TRANSLATE = "translate_loc_to_hisparse_device"
INIT, COLLECT = "HiSparseCoordinator.__init__", "HiSparseCoordinator.collect_ready_reqs"
EAGLE, VERIFY = "sglang.srt.speculative.eagle_worker", "EAGLEWorker.verify"
START = "Scheduler.__init__"
POOLS, BUILD = "sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator._init_pools"
FREE = "release_kv_cache("
JOIN = "Scheduler._build_hisparse_decode_batch"
LOGPROB = "sglang.srt.layers.utils.logprob"
RETURN = "            return\n        "

JOINING = (
    Fork(
        "logprob-ids",
        "of the answer",
        NEW,
        SCHEDULER,
        JOIN,
        "r.origin_input_ids) for",
        "r.output_ids) for",
        "output_ids",
    ),
    Fork("logprob-ids", "always", OLD, SCHEDULER, JOIN, "if batch.return_logprob:", "if reqs:", "batch.return_logprob"),
    Fork("logprob-ids", "more parameters", OLD, SCHEDULER, JOIN, "(self, reqs)", "(self, reqs, chunk)", "chunk"),
    Fork(
        "logprob-none",
        "another stage",
        OLD,
        LOGPROB,
        "get_token_ids_logprobs_raw",
        "stage == LogprobStage.DECODE:",
        "stage.decodes:",
        "0 such tensors",
    ),
    Fork(
        "logprob-none",
        "another filler",
        OLD,
        LOGPROB,
        "get_token_ids_logprobs_raw",
        "vals.append([])",
        "vals.append(logprobs[i, :0])",
        "new_empty",
    ),
    Fork(
        "multimodal-batch",
        "of some",
        NEW,
        SCHEDULER,
        JOIN,
        "if batch.return_logprob:",
        "if self.is_multimodal:\n            batch.multimodal_inputs = []\n        if batch.return_logprob:",
        "self.is_multimodal",
    ),
)

WORKER = "TpModelWorker.forward_batch_generation"
SPECULATIVE = (
    Fork("speculative", "another parameter", SPEC, BATCH_WORKER, WORKER, "is_verify", "verifies", "verifies"),
    Fork(
        "speculative", "another holder", SPEC, ATTENTION, EXTEND, "self.hisparse_co", "self.sparse_co", "self.sparse_co"
    ),
    Fork("speculative", "translates elsewhere", SPEC, ATTENTION, EXTEND, TRANSLATE, "translate", "0, if"),
    Fork(
        "speculative", "always fused", SPEC, ATTENTION, INDEXER, "force_unfused_topk=force", "fused=not force", "fused"
    ),
    Fork("speculative", "another table", SPEC, COORDINATOR, INIT, "self.lru_slots", "self.lru", "no lru_slots"),
    Fork(
        "speculative", "renamed", SPEC, COORDINATOR, COLLECT, "def collect_ready", "def collect", "collect_ready_reqs"
    ),
    Fork("speculative", "another argument", OLD, EAGLE, VERIFY, "batch: Sch", "work: Sch", "work"),
    Fork("speculative-guard", "another argument", GUARD, SCHEDULER, START, "server_args: S", "args: S", "server_args"),
    Fork("speculative-guard", "pools elsewhere", GUARD, POOLS, BUILD, "def _init_pools", "def _build", "_init_pools"),
)

BACKUP = "HiSparseCoordinator._eager_backup_previous_token"
COST = (
    Fork("index-upload", "another device", OLD, COORDINATOR, BACKUP, "device=self.device", "device=0", "device=0"),
    Fork(
        "index-upload",
        "sends more",
        OLD,
        COORDINATOR,
        BACKUP,
        "if not backup",
        "seq_lens.to(0)\n        if not backup",
        "2 to(",
    ),
)

FORKS = (
    Fork("retract-order", "frees elsewhere", OLD, BATCH, METHOD, "release_kv_cache(", "give_up(", "release_kv_cache"),
    Fork("retract-order", "another parameter", OLD, BATCH, METHOD, "idx: int", "position: int", "position"),
    Fork("retract-order", "another request", OLD, BATCH, METHOD, "self.reqs[idx]", "self.request(idx)", "self.request"),
    Fork("retract-order", "gone", OLD, BATCH, METHOD, "def release_req", "def free_req", "release_req"),
    Fork(
        "retract-order",
        "told too late",
        OLD,
        BATCH,
        METHOD,
        "req.reset_for_retract()",
        "self.hisparse_coordinator.retract_req(req)",
        "retract_req(req) in line",
    ),
    Fork(
        "retract-order",
        "another condition",
        NEW,
        BATCH,
        "release_req",
        "req.finished()",
        "req.is_retracted",
        "is_retracted",
    ),
    Fork(
        "retract-once",
        "does more",
        OLD,
        COORDINATOR,
        "HiSparseCoordinator.retract_req",
        "if req.hisparse_staging:",
        "self.log(req)\n        if req.hisparse_staging:",
        "log",
    ),
    Fork(
        "finish-unbuffered",
        "another condition",
        NEW,
        COORDINATOR,
        FINISHED,
        "current_cap > 0",
        "current_cap > 1",
        "> 1",
    ),
    Fork(
        "finish-unbuffered",
        "another table",
        OLD,
        COORDINATOR,
        FINISHED,
        "full_to_hisparse_device_index_mapping",
        "device_slots",
        "full_to_hisparse_device_index_mapping",
    ),
    Fork(
        "direct-flag",
        "a third flag",
        OLD,
        COORDINATOR,
        "HiSparseCoordinator.admit_request_direct",
        "req.staging",
        "req.on_its_way",
        "0 and 0",
    ),
    Fork(
        "batch-full", "batch as an argument", OLD, SCHEDULER, NEXT, "(self)", "(self, running_batch)", "running_batch"
    ),
    Fork(
        "batch-full",
        "another condition",
        NEW,
        SCHEDULER,
        NEXT,
        "            running_batch.batch_is_full = False",
        "            if ready_reqs: running_batch.batch_is_full = False",
        "ready_reqs",
    ),
    Fork(
        "idle-staging",
        "another parameter",
        OLD,
        SCHEDULER,
        "Scheduler.is_fully_idle",
        "for_health_check",
        "health",
        "health",
    ),
    Fork(
        "pause-staged", "other function", NEW, SCHEDULER, "Scheduler.pause_generation", "retract_all(", "give_up(", "0"
    ),
    Fork(
        "quick-finish",
        "another condition",
        OLD,
        MIXIN,
        "SchedulerOutputProcessorMixin.process_batch_result_prebuilt",
        "if req.finished()",
        "if req.finished_reason",
        "finished_reason",
    ),
    Fork(
        "checksum-drop",
        "frees elsewhere",
        NEW,
        DECODE,
        "SchedulerDisaggregationDecodeMixin._handle_kv_checksum_mismatch",
        "release_kv_cache(",
        "give_up(",
        "0",
    ),
    Fork(
        "chunked-abort",
        "another request",
        NEW,
        SCHEDULER,
        "Scheduler.process_pending_chunked_abort",
        "self._pending_chunked_abort_req",
        "self._next_abort",
        "another source",
    ),
    Fork(
        "prefill-estimate",
        "another estimate",
        OLD,
        "sglang.srt.mem_cache.hisparse_memory_pool",
        "HiSparseTokenToKVPoolAllocator.alloc_extend",
        "len(seq_lens) * self",
        "2 * len(seq_lens) * self",
        "0 of the other",
    ),
    Fork(
        "slot-count",
        "another condition",
        OLD,
        SCHEDULER,
        "Scheduler.get_num_allocatable_reqs",
        "self.pp_size > 1",
        "self.pp_size > 2",
        "> 2",
    ),
    Fork(
        "staging-abort",
        "another meaning",
        NEW,
        SCHEDULER,
        "Scheduler.abort_request",
        "or req.rid.startswith(recv_req.rid):\n                to_del",
        "or recv_req.means(req):\n                to_del",
        "recv_req.means",
    ),
    Fork(
        "tp-ready", "another vote", NEW, COORDINATOR, COLLECT, "(finish_count, d", "(-finish_count, d", "-finish_count"
    ),
    Fork(
        "tp-ready",
        "another group",
        NEW,
        COORDINATOR,
        "HiSparseCoordinator.__init__",
        "self.tp_group = tp_group",
        "self.tp_group = voters(tp_group)",
        "voters",
    ),
    Fork(
        "pp-layer",
        "another row",
        OLD,
        COORDINATOR,
        "HiSparseCoordinator.swap_in_selected_pages",
        "tokens[layer_id]",
        "tokens[self.row(layer_id)]",
        "self.row",
    ),
    Fork(
        "mixed-chunk",
        "another condition",
        OLD,
        SCHEDULER,
        "Scheduler.init_chunked_prefill",
        "and self.server_args.enable_mixed_chunk",
        "and self.may_mix",
        "self.may_mix",
    ),
    Fork(
        "waiting-abort",
        "frees elsewhere",
        GUARD,
        SCHEDULER,
        "Scheduler.abort_request",
        "release_kv_cache(req, self.tree_cache)",
        "give_up(req)",
        "none",
    ),
    Fork("pd-retract", "another copy", OLD, BATCH, METHOD, "req.offload_kv_cache(", "req.save_kv(", "0"),
    # a fix that only looks like one
    Fork(
        "pause-staged",
        "queue in a log line",
        NEW,
        SCHEDULER,
        PAUSE,
        "self.running_batch.reqs = []",
        "logger.info(f'{len(self.hisparse_coordinator.ack_staging_queue)}')\n        self.running_batch.reqs = []",
        "ack_staging_queue",
    ),
    Fork(
        "pause-staged",
        "queue too late",
        NEW,
        SCHEDULER,
        PAUSE,
        "self.running_batch.reqs = []",
        "late = [a.req for a in self.hisparse_coordinator.ack_staging_queue]\n        self.running_batch.reqs = []",
        "before retract_all",
    ),
    Fork(
        "retract-once",
        "another early return",
        OLD,
        COORDINATOR,
        RETRACT,
        "if req.hisparse_staging:",
        "if not req.finished() and self.frozen:\n            return\n        if req.hisparse_staging:",
        "self.frozen",
    ),
    Fork(
        "quick-finish",
        "metrics are told",
        OLD,
        MIXIN,
        PREBUILT,
        "release_kv_cache(",
        "self.metrics.request_finished(req)\n                release_kv_cache(",
        "metrics",
    ),
    Fork(
        "quick-finish",
        "told with metrics only",
        OLD,
        MIXIN,
        PREBUILT,
        "release_kv_cache(",
        "if self.metrics: self.hisparse_coordinator.request_finished(req)\n                release_kv_cache(",
        "self.metrics",
    ),
    Fork(
        "checksum-drop",
        "told with metrics only",
        NEW,
        DECODE,
        DROP,
        "release_kv_cache(",
        "self.enable_metrics and self.hisparse_coordinator.request_finished(req)\n        release_kv_cache(",
        "enable_metrics",
    ),
    Fork(
        "chunked-abort",
        "metrics are told",
        NEW,
        SCHEDULER,
        ABORT,
        "release_kv_cache(",
        "self.metrics.request_finished(req)\n        release_kv_cache(",
        "metrics",
    ),
    Fork(
        "idle-staging",
        "queue in a log line",
        OLD,
        SCHEDULER,
        "Scheduler.is_fully_idle",
        "return idle",
        "logger.info(self.hisparse_coordinator.has_ongoing_staging())\n        return idle",
        "changes nothing",
    ),
    Fork(
        "retract-order",
        "another receiver",
        NEW,
        BATCH,
        "release_req",
        "hisparse_coordinator.retract_req(req)",
        "tree_cache.retract_req(req)",
        "tree_cache",
    ),
    # a free that is not always reached, or more than once
    Fork("retract-order", "early return", OLD, BATCH, METHOD, FREE, f"if self.frozen:\n{RETURN}{FREE}", "frozen"),
    Fork(
        "retract-order",
        "early return in a loop",
        OLD,
        BATCH,
        METHOD,
        FREE,
        f"for hook in self.exits:\n            if hook(req): return\n        {FREE}",
        "hook(req)",
    ),
    Fork("retract-order", "in a loop", OLD, BATCH, METHOD, FREE, f"for _ in self.parts: {FREE}", "self.parts"),
    Fork(
        "quick-finish",
        "early continue",
        OLD,
        MIXIN,
        PREBUILT,
        "if req.finished()",
        "if req.frozen:\n                continue\n            if req.finished()",
        "frozen",
    ),
    Fork("checksum-drop", "early return", NEW, DECODE, DROP, FREE, f"if self.frozen:\n{RETURN}{FREE}", "frozen"),
    Fork("chunked-abort", "early return", NEW, SCHEDULER, ABORT, FREE, f"if self.frozen:\n{RETURN}{FREE}", "frozen"),
    Fork(
        "pause-staged",
        "early return",
        NEW,
        SCHEDULER,
        PAUSE,
        "retract_reqs = [",
        f"if self.frozen:\n{RETURN}retract_reqs = [",
        "frozen",
    ),
    # what a hook cannot stand in for
    Fork("retract-order", "static", OLD, BATCH, METHOD, "    def", "    @staticmethod\n    def", "@staticmethod"),
    Fork("direct-flag", "decorated", OLD, COORDINATOR, ADMIT, "    def", "    @traced(1)\n    def", "@traced(1)"),
    Fork("finish-unbuffered", "async", OLD, COORDINATOR, FINISHED, "def", "async def", "async"),
    Fork("retract-order", "keyword only", OLD, BATCH, METHOD, "self, idx", "self, *, idx", "*, idx"),
    Fork("retract-once", "more parameters", OLD, COORDINATOR, RETRACT, "req: Req", "req: Req, hard=False", "hard"),
    Fork("batch-full", "any parameters", OLD, SCHEDULER, NEXT, "(self)", "(self, *args)", "*args"),
    # the fix in another form
    Fork(
        "retract-order",
        "finished instead",
        OLD,
        BATCH,
        METHOD,
        FREE,
        f"self.hisparse_coordinator.request_finished(req)\n        {FREE}",
        "retract_req(req) or nothing",
    ),
    Fork(
        "retract-order",
        "told by a helper",
        OLD,
        BATCH,
        METHOD,
        "def release_req(",
        "def tell(self, req):\n        self.coordinator().retract_req(req)\n\n    def release_req(",
        "ScheduleBatch.tell",
        FREE,
        f"self.tell(req)\n        {FREE}",
    ),
    *SPECULATIVE,
    *COST,
    *JOINING,
)

#: Put at the end of a module, each makes of a method something that its class does not show.
ADDED = {
    "another class": (
        "class ScheduleBatch:\n    def release_req(self, position): ...\n",
        "one call of release_kv_cache",
    ),
    "assigned": ("ScheduleBatch.release_req = lambda self, idx: None\n", "ScheduleBatch.release_req"),
    "set": ('setattr(ScheduleBatch, "release_req", print)\n', "ScheduleBatch.release_req"),
    "assigned in a branch": ("if True:\n    ScheduleBatch.release_req = print\n", "ScheduleBatch.release_req"),
    "class bound anew": ("ScheduleBatch = final(ScheduleBatch)\n", "ScheduleBatch"),
}
