"""Names of SGLang's modules; where a thing has moved, all its places, the oldest first."""

CACHE = "sglang.srt.mem_cache.common"
BATCH = "sglang.srt.managers.schedule_batch"
COORDINATOR = "sglang.srt.managers.hisparse_coordinator"
DECODE = "sglang.srt.disaggregation.decode"
#: Where logprobs are gathered: in the first to 0.5.15, in the second from 0.5.16.
LOGPROBS = ("sglang.srt.layers.utils.logprob", "sglang.srt.layers.logprob_processor")
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
POLICY = "sglang.srt.managers.schedule_policy"
SCHEDULER = "sglang.srt.managers.scheduler"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
#: Where HiSparse's allocator is: in the first to 0.5.13, in the second from 0.5.14.
ALLOCATORS = ("sglang.srt.mem_cache.hisparse_memory_pool", "sglang.srt.mem_cache.allocator.hisparse")
#: Where the flag --enable-hisparse is declared: the first to 0.5.19, from 0.5.20 below the second.
ARGUMENTS = ("sglang.srt.server_args", "sglang.srt.arg_groups")
#: Where arguments that HiSparse does not go with are refused, from 0.5.20.
ARGUMENTS_OF_HISPARSE = "sglang.srt.arg_groups.hisparse_hook"
#: The class that processes a batch's result: a mixin of the scheduler to 0.5.12, a component of it from 0.5.13.
RESULT_PROCESSORS = (
    ("sglang.srt.managers.scheduler_output_processor_mixin", "SchedulerOutputProcessorMixin"),
    ("sglang.srt.managers.scheduler_components.batch_result_processor", "SchedulerBatchResultProcessor"),
)
#: Where SGLang says how many slots a step that speculates takes: the last to 0.5.12, the first from 0.5.16.
STEP_SIZES = ("sglang.srt.mem_cache.allocation_sizing", CACHE, "sglang.srt.managers.utils")
