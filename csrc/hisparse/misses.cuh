// The misses of a request: which there are, which slot each takes, and its copy.
#pragma once

#include <cstdint>

#include "../common/copy.cuh"
#include "found.cuh"

namespace hisparse_plugin {

// How many bits of the words before each lane's are zero; a lane has kPerLane words.
template <int kWords>
struct Zeros {
  static constexpr int kPerLane = ceil_div(kWords, 32);
  int before;

  __device__ __forceinline__ explicit Zeros(const uint32_t* bits) {
    const int lane = threadIdx.x % 32;
    int own = 0;
#pragma unroll 8
    for (int k = 0; k < kPerLane; ++k) {
      const int w = lane * kPerLane + k;
      own += w < kWords ? __popc(~bits[w]) : 0;
    }
    before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += lower;
    }
    before -= own;
  }

  // Position of the n-th zero, from 0. The same n in all lanes.
  __device__ __forceinline__ int find_one(const uint32_t* bits, int n) const {
    const int lane = threadIdx.x % 32, at = __popc(__ballot_sync(~0u, before <= n)) - 1;
    n -= __shfl_sync(~0u, before, at);
    int word = at * kPerLane;
    uint32_t zeros = ~bits[word];
    for (int here = __popc(zeros); n >= here; here = __popc(zeros)) {
      n -= here;
      zeros = ~bits[++word];
    }
    const bool nth = (zeros >> lane & 1) && __popc(zeros & ((1u << lane) - 1)) == n;
    return word * 32 + __ffs(__ballot_sync(~0u, nth)) - 1;
  }

  // The same with an n of its own in each lane. All lanes call.
  __device__ __forceinline__ int find(const uint32_t* bits, int n) const {
    int at = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (__shfl_sync(~0u, before, at + step) <= n) at += step;
    }
    n -= __shfl_sync(~0u, before, at);
    int word = at * kPerLane;
    uint32_t zeros = ~bits[min(word, kWords - 1)];
#pragma unroll 4
    for (int k = 1; k < kPerLane; ++k) {
      const int here = __popc(zeros);
      if (n < here || word + 1 >= kWords) break;
      n -= here;
      zeros = ~bits[++word];
    }
    int bit = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const int lower = __popc(zeros & ((1u << width) - 1));
      if (n >= lower) {
        n -= lower;
        zeros >>= width;
        bit += width;
      }
    }
    return word * 32 + bit;
  }
};

// The misses of one request, dealt out to the warps of its cluster: in round n, lane l of warp w takes miss
// (32 n + l) * all warps + w. Neighbouring misses go to different blocks.
template <typename Config>
struct Work {
  static constexpr int kWarps = Config::kCluster * Config::kWarps;
  int misses, first;
  Zeros<Config::kTopKWords> unsettled;
  Zeros<Config::kHotWords> kept;

  struct Miss {
    int64_t host_row;
    int32_t device_row, token;
    int index, slot;
  };

  __device__ __forceinline__ Work(const SharedMemory<Config>& s, int misses, int rank)
      : misses(misses), first(threadIdx.x / 32 * Config::kCluster + rank), unsettled(s.settled), kept(s.hits) {}
  __device__ __forceinline__ bool has(int round) const { return first + round * 32 * kWarps < misses; }
  __device__ __forceinline__ int number(int round) const { return first + (round * 32 + threadIdx.x % 32) * kWarps; }

  // Miss m is the m-th unsettled entry and takes the m-th slot in LRU order that no hit keeps.
  __device__ __forceinline__ Miss place(
      const SharedMemory<Config>& s, const SwapInParams& p, const Request& r, int round) const {
    const int m = min(number(round), misses - 1);
    Miss miss;
    if (misses <= kWarps) {  // at most one for each warp
      if (first >= misses) return {};
      miss.index = unsettled.find_one(s.settled, first);
      miss.slot = s.lru[kept.find_one(s.hits, first)];
    } else {
      miss.index = unsettled.find(s.settled, m);
      miss.slot = s.lru[kept.find(s.hits, m)];
    }
    miss.token = s.selected[miss.index];
    miss.host_row = ptx::load(r.host_locs + miss.token);
    miss.device_row = ptx::load(r.buffer_locs + miss.slot);
    return miss;
  }

  __device__ __forceinline__ void record(
      const Miss& miss, const SwapInParams& p, const Request& r, int row, int round) const {
    const int m = number(round);
    if (m >= misses) return;
    ptx::store(r.buffer_tokens + miss.slot, miss.token);
    ptx::store(r.locs_out + miss.index, miss.device_row);
    if (p.miss_src) {
      p.miss_src[row * p.miss_src_stride + m] = miss.host_row;
      p.miss_dst[row * p.miss_dst_stride + m] = miss.device_row;
    }
  }

  __device__ __forceinline__ void copy(const Miss& miss, const SwapInParams& p, int round) const {
    const int left = misses - (first + round * 32 * kWarps);
    if (left <= 0) return;
    copy_rows<Config::kInFlight>(
        p.host_rows + miss.host_row * p.host_row_stride, p.device_rows + miss.device_row * p.device_row_stride,
        min(32, ceil_div(left, kWarps)), p.row);
  }
};

}  // namespace hisparse_plugin
