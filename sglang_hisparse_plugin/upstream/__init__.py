"""Where things live in which SGLang release. Nothing else knows; SGLang is imported only when a function runs."""

from .arguments import draft_tokens, finds_next_token_layer, is_on, is_resolved, model_and_top_k, resolved
from .disaggregation import transferred, transfers
from .memory import (
    back_up,
    device_tokens,
    free_host,
    free_slots,
    host_missing,
    host_reserved,
    host_slots_for,
    host_slots_held,
    is_hisparse,
    mapping_of,
    paged,
    pools,
    reserve_host,
    row_bytes,
    settled,
)
from .places import (
    ARGUMENTS,
    ARGUMENTS_OF_HISPARSE,
    BATCH,
    CACHE,
    COORDINATOR,
    DECODE,
    LOGPROBS,
    MOONCAKE,
    POLICY,
    RESULT_PROCESSORS,
    SCHEDULER,
    STREAMER,
)
from .requests import (
    BAD_REQUEST,
    CLIENT,
    NEVER,
    abort_reason,
    aborted,
    allocated_len,
    answer_abort,
    batch_of,
    committed_len,
    means,
    refuse,
    release,
    resumable,
    retract,
    slot,
    token_ids_logprob,
)
from .scheduling import (
    act,
    budget_of,
    finishing,
    holders,
    left_out,
    metric_labels,
    no_room,
    pass_in_flight,
    pipeline_stages,
    poll_state,
    prefills,
    ranks_with_same_requests,
    tp_rank,
)
from .source import (
    allocator_method,
    coordinator_method,
    decode_method,
    has_hisparse,
    lacks_hisparse,
    release_req,
    result_method,
    scheduler_method,
)
from .speculation import hand_over_draft, relay_untouched, scratch, speculates, tokens_ahead, waits_for_device
