// A request as every block of its cluster sees it; requests that need no look-up; counters.
#pragma once

#include <cstdint>

#include "../common/ptx.cuh"
#include "config.cuh"
#include "params.h"

namespace hisparse_plugin {

// f(i) for i in [0, kCount), dealt out to the threads of a block; unrolled, for the loads and stores of all to overlap.
template <int kCount, int kThreads, typename F>
__device__ __forceinline__ void for_each(F f) {
#pragma unroll
  for (int first = 0; first < kCount; first += kThreads) {
    const int i = first + threadIdx.x;
    if (kCount % kThreads == 0 || i < kCount) f(i);
  }
}

struct Request {
  const int32_t* buffer_locs;
  const int64_t* host_locs;
  int32_t* buffer_tokens;
  int16_t* lru;
  int32_t* locs_out;
  int32_t seq_len, tail_start, buffer_width;
  bool real;  // false: a row that pads the batch to a captured size; its tables are not to be written

  // Slot of an entry that is not looked up: no token, or one whose slot follows from its position. -1: none.
  __device__ __forceinline__ int fixed_slot(int32_t token, int hot) const {
    if (token < 0 || token >= seq_len) return -1;
    const int slot = token >= tail_start ? hot + 1 + (token - tail_start) : min(token, hot);
    return slot < buffer_width ? slot : -1;
  }
  __device__ __forceinline__ int32_t loc(int slot) const { return slot < 0 ? -1 : ptx::load(buffer_locs + slot); }
};

// The low half of an int64 stands first.
__device__ __forceinline__ const int32_t* element(const IndexArray& array, int at) {
  return reinterpret_cast<const int32_t*>(static_cast<const char*>(array.data) + at * array.element_bytes);
}

// What a request is told by: read once for a block, for all blocks ask the same few sectors of L2. A lane reads one.
__device__ __forceinline__ const int32_t* request_word(const SwapInParams& p, int row) {
  switch (threadIdx.x) {
    case 0: return p.num_real_reqs;
    case 1: return element(p.req_pool_indices, row);
    case 2: return element(p.seq_lens, row);
    case 3: return p.tail_start.data ? element(p.tail_start, row) : nullptr;
    default: return nullptr;
  }
}

__device__ __forceinline__ Request load_request(const SwapInParams& p, int row, const int32_t (&words)[4]) {
  const uint32_t slot = words[1];
  const int32_t seq_len = words[2];
  return {ptx::in_register(p.device_buffer_locs + uint64_t{slot} * p.buffer_locs_stride),
          ptx::in_register(p.host_cache_locs + uint64_t{slot} * p.host_locs_stride),
          ptx::in_register(p.device_buffer_tokens + uint64_t{slot} * p.buffer_tokens_stride),
          ptx::in_register(p.lru_slots + uint64_t{slot} * p.lru_stride),
          ptx::in_register(p.top_k_device_locs + row * p.locs_out_stride),
          seq_len,
          p.tail_start.data ? words[3] : seq_len,
          p.buffer_width,
          p.num_real_reqs == nullptr || row < words[0]};
}

// Copy a row of a table to shared memory; it is there after copy_async_wait and a block barrier.
template <int kCount, int kThreads, typename T, typename U>
__device__ __forceinline__ void stage(U* shared, const T* row) {
  constexpr int kVector = 16 / sizeof(T);
  if (kCount % kVector == 0 && __builtin_expect(reinterpret_cast<uint64_t>(row) % 16 == 0, 1)) {
    for_each<kCount / kVector, kThreads>([&](int i) { ptx::copy_async_16(shared + i * kVector, row + i * kVector); });
  } else {
#pragma unroll 1
    for (int i = threadIdx.x; i < kCount; i += kThreads) shared[i] = ptx::load(row + i);
  }
}

// The warp that counts; a lane sees to one counter.
template <typename Config>
__device__ __forceinline__ bool in_last_warp() {
  return threadIdx.x >= Config::kThreads - 32;
}

// Every request is first counted as one without a miss, in few instructions: in a call that misses nothing what stands
// between the look-up and the end is waited for.
__device__ __forceinline__ void count_hits(const SwapInParams& p, int hits, bool request) {
  const int lane = threadIdx.x % 32;
  const int64_t add = lane == 0 ? hits : lane == 3 || lane == kMissCounters ? request : 0;
  if (add != 0) atomicAdd(p.counters + lane, static_cast<unsigned long long>(add));
}

// What `count_hits` took for hits were misses: done while rows are on their way.
__device__ __forceinline__ void count_misses(const SwapInParams& p, int misses) {
  const int lane = threadIdx.x % 32, bucket = kMissCounters + min(32 - __clz(misses), kCounters - kMissCounters - 1);
  const int64_t add = lane == 0   ? -misses
                      : lane == 1 ? misses
                      : lane == 2 ? int64_t{misses} * p.row_bytes
                      : lane == 3 ? 1
                                  : -1;
  const int at = lane == 3 ? bucket : lane;
  if (lane <= kMissCounters) atomicAdd(p.counters + at, static_cast<unsigned long long>(add));
}

// Padding, and sequences the buffer holds whole, in order: no tables but the locs are read, none is written.
template <typename Config>
__device__ __forceinline__ void answer_from_positions(
    SharedMemory<Config>& s, const SwapInParams& p, const Request& r, const int32_t* top_k, int rank) {
  constexpr int kStep = Config::kCluster * Config::kThreads, kRounds = ceil_div(Config::kTopK, kStep);
  const int row = blockIdx.x / Config::kCluster, first = rank * Config::kThreads + threadIdx.x;
  if (p.miss_count && rank == 0 && threadIdx.x == 0) p.miss_count[row] = 0;
  int32_t locs[kRounds];
  int hits = 0;
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int i = first + k * kStep;
    const int slot = r.real && i < Config::kTopK ? r.fixed_slot(ptx::load(top_k + i), Config::kHot) : -1;
    locs[k] = r.loc(slot);
    hits += slot >= 0;
  }
  if (p.counters && r.real) {  // while the locs are on their way
    hits = __reduce_add_sync(~0u, hits);
    if (threadIdx.x % 32 == 0) atomicAdd(&s.hits_in_order, hits);
    __syncthreads();
    if (in_last_warp<Config>()) count_hits(p, s.hits_in_order, rank == 0);
  }
#pragma unroll
  for (int k = 0; k < kRounds; ++k) {
    const int i = first + k * kStep;
    if (i < Config::kTopK) ptx::store(r.locs_out + i, locs[k]);
  }
}

}  // namespace hisparse_plugin
