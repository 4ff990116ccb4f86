// Which tokens of the buffer are selected, in LRU order; the new order.
#pragma once

#include <cstdint>

#include "table.cuh"

namespace hisparse_plugin {

// Words of the LRU order that a warp sees to: kHotPerWarp from here. The blocks of a cluster take turns, for what was
// used last, and will mostly be hit, stands together at the end: one block with all hits would keep the others waiting.
template <typename Config>
__device__ __forceinline__ int first_word(int rank) {
  return (threadIdx.x / 32 * Config::kCluster + rank) * Config::kHotPerWarp;
}
template <typename Config>
__device__ __forceinline__ bool has_word(int w) {
  return Config::kHotIsEven || w < Config::kHotWords;
}
// How many words a block sees to.
template <typename Config>
__device__ __forceinline__ int own_words(int rank) {
  constexpr int kWhole = Config::kHotWords / Config::kHotPerWarp, kRest = Config::kHotWords % Config::kHotPerWarp;
  const int whole = kWhole / Config::kCluster + (rank < kWhole % Config::kCluster);
  return whole * Config::kHotPerWarp + (rank == kWhole % Config::kCluster ? kRest : 0);
}
template <typename Config>
__device__ __forceinline__ bool has_place(int place) {
  return Config::kHot % 32 == 0 || place < Config::kHot;
}

// Of the tables of the buffer, what the look-up needs.
template <typename Config>
__device__ __forceinline__ void stage_tables(SharedMemory<Config>& s, const Request& r) {
  stage<Config::kHot, Config::kThreads>(s.lru, r.lru);
  if constexpr (Config::kTokensInShared) stage<Config::kHot, Config::kThreads>(s.tokens, r.buffer_tokens);
  ptx::copy_async_group();
}
// And the answers.
template <typename Config>
__device__ __forceinline__ void stage_locs(SharedMemory<Config>& s, const Request& r) {
  if constexpr (Config::kLocsInShared) stage<Config::kHot, Config::kThreads>(s.locs, r.buffer_locs);
}

// The places in LRU order that this block looks up; a lane has kAtOnce at a time.
template <typename Config>
struct Residents {
  static constexpr int kRounds = Config::kHotPerWarp <= 12 ? 1 : ceil_div(Config::kHotPerWarp, 8);
  static constexpr int kAtOnce = ceil_div(Config::kHotPerWarp, kRounds);
  static constexpr bool kEven = Config::kHotIsEven && Config::kHotPerWarp % kAtOnce == 0;
  int slots[kAtOnce];
  uint32_t found[kAtOnce];  // as in `follow`
  uint32_t hits[kAtOnce];   // of the whole warp
  int32_t locs[kAtOnce];    // where it is; unless kListed

  // Whether this warp has the word `at` after its first.
  __device__ __forceinline__ static bool has(int rank, int at) {
    return (Config::kHotPerWarp % kAtOnce == 0 || at < Config::kHotPerWarp) &&
           has_word<Config>(first_word<Config>(rank) + at);
  }

  __device__ __forceinline__ void look_up(SharedMemory<Config>& s, const Request& r, int rank, int round) {
    const int first = first_word<Config>(rank) + round * kAtOnce, lane = threadIdx.x % 32;
    int32_t tokens[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int place = (first + k) * 32 + lane;
      slots[k] = has(rank, round * kAtOnce + k) && has_place<Config>(place) ? s.lru[place] : -1;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      tokens[k] = -1;
      if (kEven || slots[k] >= 0) {
        if constexpr (Config::kTokensInShared) {
          tokens[k] = s.tokens[slots[k]];
        } else {
          tokens[k] = ptx::load(r.buffer_tokens + slots[k]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      found[k] = difference<Config>(tokens[k], bucket(s, tokens[k]));
      if (!Config::kBitLeft && tokens[k] < 0) found[k] = kEmpty;
    }
    follow<Config>(s, tokens, found);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const bool hit = is_entry<Config>(found[k]);
      hits[k] = __ballot_sync(~0u, hit);
      if constexpr (Config::kListed) {
        if (hit) s.slots[entry_of<Config>(found[k])] = static_cast<uint16_t>(slots[k]);
      }
    }
    if constexpr (kEven && kAtOnce % 4 == 0) {
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 4) {
        const uint4 four = make_uint4(hits[k], hits[k + 1], hits[k + 2], hits[k + 3]);
        if (lane == 0) reinterpret_cast<uint4*>(s.hits)[(first + k) / 4] = four;
        if constexpr (Config::kCluster > 1) {
          if (lane < Config::kCluster && lane != rank) ptx::mail(&s.hits[first + k], four, &s.hits_mailbox, lane);
        }
      }
    } else {
      // A lane tells one block of one word.
      constexpr int kWordsAtOnce = 32 / Config::kCluster;
      const int to = lane % Config::kCluster;
#pragma unroll
      for (int base = 0; base < kAtOnce; base += kWordsAtOnce) {
        const int at = base + lane / Config::kCluster;
        uint32_t word = hits[base];
#pragma unroll
        for (int k = base + 1; k < kAtOnce && k < base + kWordsAtOnce; ++k) word = at == k ? hits[k] : word;
        if (at >= kAtOnce || !has(rank, round * kAtOnce + at)) continue;
        if (Config::kCluster == 1 || to == rank) {
          s.hits[first + at] = word;
        } else {
          ptx::mail(&s.hits[first + at], word, &s.hits_mailbox, to);
        }
      }
    }
    if constexpr (!Config::kListed) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (!is_entry<Config>(found[k])) continue;
        const int entry = entry_of<Config>(found[k]);
        locs[k] = ptx::load(r.buffer_locs + slots[k]);
        atomicOr(&s.found[entry / 32], 1u << entry % 32);
      }
    }
  }

  // Unless kListed.
  __device__ __forceinline__ void answer(const Request& r) const {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (is_entry<Config>(found[k])) ptx::store(r.locs_out + entry_of<Config>(found[k]), locs[k]);
    }
  }
};

struct Totals {
  int misses;
  int kept;         // slots without a hit
  int hits_before;  // hits in the LRU order before this warp's words
};

template <typename Config>
__device__ __forceinline__ Totals total(const SharedMemory<Config>& s, int rank) {
  const int first = first_word<Config>(rank), lane = threadIdx.x % 32;
  uint32_t sum = 0;  // all in the lower half, those before `first` in the upper
  constexpr int kPerLane = Config::kHotWords / 32;
  if constexpr (Config::kHotWords % 64 == 0 && Config::kHotPerWarp % kPerLane == 0) {  // neighbouring words of one warp
#pragma unroll
    for (int k = 0; k < kPerLane; k += 2) {
      const uint2 two = reinterpret_cast<const uint2*>(s.hits)[(lane * kPerLane + k) / 2];
      sum += __popc(two.x) + __popc(two.y);
    }
    sum += lane * kPerLane < first ? sum << 16 : 0;
  } else {
#pragma unroll 4
    for (int w = lane; w < Config::kHotWords; w += 32) {
      const uint32_t hits = __popc(s.hits[w]);
      sum += hits + (w < first ? hits << 16 : 0);
    }
  }
  sum = __reduce_add_sync(~0u, sum);
  const int hits = sum & 0xffff;
  return {Config::kEntries - s.not_looked_up - hits, Config::kHot - hits, static_cast<int>(sum >> 16)};
}

// New order: slots nobody asked for, then the just-loaded, then the hits; each keeps its old order. hits(at): all hits of the
// word `at` of this warp; slot(at): what stands at this lane's place in it.
template <typename Config, bool kMisses, typename Hits, typename Slot>
__device__ __forceinline__ void write_lru(int16_t* lru, int rank, const Totals& totals, Hits hits, Slot slot) {
  const int lane = threadIdx.x % 32, first = first_word<Config>(rank);
  constexpr int kUnroll = kMisses ? 4 : Config::kHotPerWarp;
  int hits_before = totals.hits_before;
#pragma unroll kUnroll
  for (int at = 0; at < Config::kHotPerWarp; ++at) {
    const int place = (first + at) * 32 + lane;
    if (!has_word<Config>(first + at)) return;
    const uint32_t word = hits(at);
    const int up_to_here = hits_before + __popc(word & (~0u >> (31 - lane)));
    int to = word >> lane & 1 ? totals.kept - 1 + up_to_here : place - up_to_here - (kMisses ? totals.misses : 0);
    // A victim's number is negative here: it comes after the slots without a hit that stay.
    if (kMisses && to < 0) to += totals.kept;
    if (has_place<Config>(place)) ptx::store(lru + to, static_cast<int16_t>(slot(at)));
    hits_before = __shfl_sync(~0u, up_to_here, 31);
  }
}
template <typename Config>
__device__ __forceinline__ void write_lru(
    const SharedMemory<Config>& s, int16_t* lru, int rank, const Totals& totals) {
  const int first = first_word<Config>(rank);
  write_lru<Config, true>(
      lru, rank, totals, [&](int at) { return s.hits[first + at]; },
      [&](int at) { return s.lru[(first + at) * 32 + threadIdx.x % 32]; });
}
// Of a call without a miss, from registers where a warp has found all its places at once.
template <typename Config>
__device__ __forceinline__ void write_lru_of_hits(
    const SharedMemory<Config>& s, const Residents<Config>& residents, int16_t* lru, int rank, const Totals& totals) {
  if constexpr (Residents<Config>::kRounds == 1) {
    write_lru<Config, false>(
        lru, rank, totals, [&](int at) { return residents.hits[at]; }, [&](int at) { return residents.slots[at]; });
  } else {
    write_lru(s, lru, rank, totals);
  }
}

}  // namespace hisparse_plugin
