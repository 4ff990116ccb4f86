"""A batch that decodes: SGLang's own pools, allocators, coordinator and `ScheduleBatch`, put together without a server.

Requests are admitted as on a decode worker, prompt in the host pool. What is left of a model is a forward pass that
takes as long as wanted and writes, on its own stream, a row known beforehand for each new token.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import tempfile
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from sglang_hisparse_plugin import upstream

LAYERS, KV_RANK, ROPE, PAGE = 2, 512, 64, 64
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
}


@dataclass(frozen=True)
class Size:
    """In tokens. A prompt is longer than the hot buffer, so that every step copies a row in steady state."""

    top_k: int
    hot: int
    prompt: int
    steps: int
    """That there is room for."""


class Decoding:
    """`requests` that decode on `device`, "cpu" or "cuda"."""

    def __init__(self, device: str, requests: int, size: Size) -> None:
        self.device, self.requests, self.size = device, requests, size
        self.clock = time.perf_counter if device == "cuda" else time.thread_time
        """Where nothing waits for a device, what counts is the work, however busy the machine is."""
        self.streams = torch.get_device_module(device)
        self._scheduler = _scheduler(device, requests, size)
        self.coordinator = self._scheduler.hisparse_coordinator
        self._forward_stream = self.streams.Stream()
        self.coordinator.set_decode_producer_stream(self._forward_stream)
        self.batch = self._admitted(requests)
        self.tokens = 0
        """Decoded so far by each request."""
        self._in_use: deque[torch.Tensor] = deque(maxlen=4)
        """What passes under way read; another stream allocated it and would use its memory again."""
        self.aside = 0.0
        """Seconds so far in what a stand-in does on a CPU: the page allocator's kernel, interpreted, and the copies."""
        if device == "cpu":
            pages = self._scheduler.token_to_kv_pool_allocator.logical_attn_allocator
            for owner, name in (
                (pages, "alloc_decode"),
                (self.coordinator.mem_pool_host, "backup_from_device_all_layer"),
            ):
                setattr(owner, name, self._apart(getattr(owner, name)))
        self.streams.synchronize()

    def prepare(self) -> None:
        """What the scheduler does for a step: look whether there is memory for it, then prepare it."""
        if not self.batch.check_decode_mem():
            raise MemoryError("the pools are too small for so many steps")
        self.batch.prepare_for_decode()

    def _apart(self, work):
        def timed(*args, **kwargs):
            start = self.clock()
            try:
                return work(*args, **kwargs)
            finally:
                self.aside += self.clock() - start

        return timed

    def forward(self, cycles: int) -> torch.Event:
        """Launch a pass that keeps the device for `cycles` and writes the new tokens' rows; its end."""
        c, new = self.coordinator, self.batch.out_cache_loc
        self._in_use.append(new)
        schedule_stream = self.streams.current_stream()
        with self.streams.stream(self._forward_stream):
            self._forward_stream.wait_stream(schedule_stream)
            upstream.settled(c)
            if cycles:
                torch.cuda._sleep(cycles)
            pool = c.mem_pool_device
            if hasattr(pool, "translate_loc_from_full_to_compressed"):
                new = pool.translate_loc_from_full_to_compressed(new)
            where = pool.full_to_hisparse_device_index_mapping[new]
            for rows in pool.kv_buffer:
                rows.view(torch.int16).flatten(1)[where] = self._values(self.tokens).unsqueeze(1)
            end = self._forward_stream.record_event(self.streams.Event())
        self.tokens += 1
        self.batch.output_ids = self.batch.seq_lens  # some token each: up to 0.5.12 the scheduler leaves them here
        return end

    def wrong_rows(self) -> int:
        """Host copies of decoded tokens that are not what was written; the last token has none yet."""
        self.streams.synchronize()
        c, wrong = self.coordinator, 0
        for token in range(self.tokens - 1):
            where = c.req_to_host_pool[self.batch.req_pool_indices, self.size.prompt + token].cpu()
            expected = self._values(token).cpu()
            for rows in c.mem_pool_host.kv_buffer:
                found = rows.view(torch.int16).flatten(1)[where.clamp(min=0)]
                wrong += int(((found != expected[:, None]).any(1) | (where < 0)).sum())
        return wrong

    @property
    def rows(self) -> int:
        """How many host rows `wrong_rows` looks at."""
        return (self.tokens - 1) * self.requests * LAYERS

    def spoil(self) -> None:
        """The control: change one host copy."""
        where = int(self.coordinator.req_to_host_pool[self.batch.req_pool_indices[0], self.size.prompt])
        self.coordinator.mem_pool_host.kv_buffer[0].view(torch.int16).flatten(1)[where] += 1

    def _values(self, token: int) -> torch.Tensor:
        """(requests,) int16: what each element of the row of a request's `token` is."""
        return (self.batch.req_pool_indices * 401 + token * 7 + 1).to(torch.int16)

    def _admitted(self, requests: int):
        batch_module = importlib.import_module("sglang.srt.managers.schedule_batch")
        sampling = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams
        queue = object.__new__(importlib.import_module("sglang.srt.disaggregation.decode").DecodePreallocQueue)
        names = ("tree_cache", "req_to_token_pool", "token_to_kv_pool_allocator", "token_to_kv_pool")
        queue.scheduler = self._scheduler
        vars(queue).update({name: getattr(self._scheduler, name) for name in names})
        arrays = "array" in str(batch_module.Req.__init__.__annotations__.get("origin_input_ids", ""))
        reqs = []
        for i in range(requests):
            ids = [5] * self.size.prompt
            params = sampling(max_new_tokens=self.size.steps, temperature=0.0, ignore_eos=True)
            params.normalize(None)
            req = batch_module.Req(str(i), "", array("q", ids) if arrays else ids, params, vocab_size=32000)
            queue._pre_alloc(req)
            req.output_ids.append(5)
            self.coordinator.admit_request_direct(req)
            reqs.append(req)
        build = importlib.import_module(upstream.SCHEDULER).Scheduler._build_hisparse_decode_batch
        batch = build(self._scheduler, reqs)
        batch.hisparse_coordinator = self.coordinator
        return batch


def _scheduler(device: str, requests: int, size: Size) -> SimpleNamespace:
    """What the code above asks a scheduler for."""
    module, server_args = importlib.import_module(upstream.COORDINATOR), _server_args(device)
    slots = (size.hot + 2 * PAGE) * requests + PAGE  # a page each is free: SGLang asks for it without need
    ratio = -(-(size.prompt + size.steps + 2 * PAGE) * requests // slots)
    pool = next(v for k, v in vars(module).items() if k in ("HiSparseNSATokenToKVPool", "HiSparseDSATokenToKVPool"))(
        **{"size": slots, "page_size": PAGE, "kv_lora_rank": KV_RANK, "dtype": torch.bfloat16},
        **{"qk_rope_head_dim": ROPE, "layer_num": LAYERS, "device": device, "index_head_dim": 128},
        **{"enable_memory_saver": False, "kv_cache_dim": KV_RANK + ROPE, "start_layer": 0, "end_layer": LAYERS - 1},
        host_to_device_ratio=ratio,
    )
    allocator = module.HiSparseTokenToKVPoolAllocator(
        slots,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
        kvcache=pool,
        need_sort=False,
        host_to_device_ratio=ratio,
    )
    rows = module.ReqToTokenPool(
        size=requests, max_context_len=size.prompt + size.steps + 2 * PAGE, device=device, enable_memory_saver=False
    )
    coordinator = module.HiSparseCoordinator(
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        top_k=size.top_k,
        device_buffer_size=size.hot,
        device=device,
        tp_group=torch.distributed.group.WORLD,
        host_to_device_ratio=ratio,
    )
    kinds = importlib.import_module("sglang.srt.speculative.spec_info").SpeculativeAlgorithm
    return SimpleNamespace(
        enable_hisparse=True,
        hisparse_coordinator=coordinator,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=pool,
        tree_cache=_no_cache(rows, allocator),
        model_config=SimpleNamespace(is_encoder_decoder=False, vocab_size=32000),
        server_args=server_args,
        enable_overlap=True,
        future_map=SimpleNamespace(stash=lambda *_, **__: None),
        spec_algorithm=kinds.NONE if hasattr(kinds, "NONE") else kinds.from_string(None),
        device=device,
    )


def _no_cache(rows, allocator):
    """As with --disable-radix-cache: a cache of its own to 0.5.21, then SGLang's only one, told to keep nothing."""
    params = importlib.import_module("sglang.srt.mem_cache.cache_init_params").CacheInitParams
    known = {"disable": True, "req_to_token_pool": rows, "token_to_kv_pool_allocator": allocator, "page_size": PAGE}
    if importlib.util.find_spec("sglang.srt.mem_cache.chunk_cache"):
        cache = importlib.import_module("sglang.srt.mem_cache.chunk_cache").ChunkCache
    else:
        cache = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache").UnifiedRadixCache
        full = importlib.import_module("sglang.srt.mem_cache.unified_cache.components").ComponentType.FULL
        known["tree_components"] = (full,)
    return cache(params(**{name: known[name] for name in inspect.signature(params).parameters if name in known}))


class _Arguments(SimpleNamespace):
    """Those that batches look at; any other as if it was not given."""

    def __getattr__(self, name: str) -> None:
        return None


def _server_args(device: str):
    """Globally and for the scheduler; from 0.5.18 SGLang wants real ones, with some model."""
    module = importlib.import_module("sglang.srt.server_args")
    if "publish(server_args" in inspect.getsource(module.set_global_server_args_for_scheduler):
        model = Path(tempfile.mkdtemp())
        (model / "config.json").write_text(json.dumps(MODEL))
        args = module.ServerArgs(model_path=str(model), device=device, skip_tokenizer_init=True, load_format="dummy")
    else:
        args = _Arguments(page_size=PAGE, dcp_size=1, enable_mamba_extra_buffer=lambda: False)
    module.set_global_server_args_for_scheduler(args)
    return args
