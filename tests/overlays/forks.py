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


METHOD = "ScheduleBatch.release_req"
NEXT = "Scheduler.get_next_batch_to_run"
FINISHED = "HiSparseCoordinator.request_finished"
MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin"
DECODE = "sglang.srt.disaggregation.decode"

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
        "slot-count",
        "another condition",
        OLD,
        SCHEDULER,
        "Scheduler.get_num_allocatable_reqs",
        "self.pp_size > 1",
        "self.pp_size > 2",
        "> 2",
    ),
)
