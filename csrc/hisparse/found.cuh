// What the blocks of a cluster found: the answers, and which entries need a row from the host.
#pragma once

#include <cstdint>

#include "residents.cuh"

namespace hisparse_plugin {

// Where `kListed`: the answers this block has found, side by side. A thread sees to four at a time.
template <typename Config>
struct Found {
  static constexpr int kRounds = ceil_div(Config::kEntries, 4 * Config::kThreads);
  int32_t locs[4];
  bool found[4];

  __device__ __forceinline__ static int index(int round, int k) {
    return (round * 4 + k) * Config::kThreads + threadIdx.x;
  }

  // And tell the others of the cluster which entries they are.
  __device__ __forceinline__ void load(SharedMemory<Config>& s, const Request& r, int rank, int round) {
    const int lane = threadIdx.x % 32;
    uint16_t slots[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = index(round, k);
      const bool has = Config::kEntries % (4 * Config::kThreads) == 0 || i < Config::kEntries;
      slots[k] = has ? s.slots[i] : kNoSlot;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      found[k] = slots[k] != kNoSlot;
      if constexpr (Config::kCluster > 1) {
        const int i = index(round, k);
        const uint32_t bits = __ballot_sync(~0u, found[k]);
        if (lane < Config::kCluster && i < Config::kEntries) {
          ptx::mail(&s.found_by[rank][i / 32], bits, &s.found_mailbox, lane);
        }
      }
      if constexpr (Config::kLocsInShared) {
        if (found[k]) locs[k] = s.locs[slots[k]];
      } else {
        if (found[k]) locs[k] = ptx::load(r.buffer_locs + slots[k]);
      }
    }
  }

  __device__ __forceinline__ void answer(const Request& r, int round) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (found[k]) ptx::store(r.locs_out + index(round, k), locs[k]);
    }
  }
};

// Otherwise: tell the others of the cluster which entries this block has found.
template <typename Config>
__device__ __forceinline__ void mail_found(SharedMemory<Config>& s, int rank) {
  for_each<Config::kTopKWords * Config::kCluster, Config::kThreads>([&](int i) {
    const int w = i / Config::kCluster;
    ptx::mail(&s.found_by[rank][w], s.found[w], &s.found_mailbox, i % Config::kCluster);
  });
}

// Put together what the blocks found.
template <typename Config>
__device__ __forceinline__ void merge_found(SharedMemory<Config>& s) {
  if constexpr (Config::kCluster == 1) {
    for (int w = threadIdx.x / 32; w < Config::kTopKWords; w += Config::kWarps) {
      const uint32_t bits = __ballot_sync(~0u, s.slots[w * 32 + threadIdx.x % 32] != kNoSlot);
      if (threadIdx.x % 32 == 0) s.settled[w] |= bits;
    }
  } else {
    for_each<Config::kTopKWords, Config::kThreads>([&](int w) {
      uint32_t bits = s.settled[w];
#pragma unroll
      for (int b = 0; b < Config::kCluster; ++b) bits |= s.found_by[b][w];
      s.settled[w] = bits;
    });
  }
}

template <typename Config>
__device__ __forceinline__ int count_unsettled(const SharedMemory<Config>& s) {
  int unsettled = 0;
  for (int w = threadIdx.x % 32; w < Config::kTopKWords; w += 32) unsettled += 32 - __popc(s.settled[w]);
  return __reduce_add_sync(~0u, unsettled);
}

}  // namespace hisparse_plugin
