// The hash table of the selected tokens, one in each block: the whole top-k in it costs less than an exchange.
#pragma once

#include <cstdint>

#include "request.cuh"

namespace hisparse_plugin {

template <typename Config>
__device__ __forceinline__ uint32_t& bucket(SharedMemory<Config>& s, int32_t token) {
  return s.buckets[token & (Config::kBuckets - 1)];
}
template <typename Config>
__device__ __forceinline__ uint32_t value_of(int32_t token, int entry) {
  return (static_cast<uint32_t>(token) & Config::kUpper) | entry << Config::kEntryShift;
}
template <typename Config>
__device__ __forceinline__ int entry_of(uint32_t value) {
  return static_cast<int>((value & ((1u << Config::kIndexBits) - 1) << Config::kEntryShift) >> Config::kEntryShift);
}
// Of a bucket's value and a token's upper bits. It says whether the entry is of that token; or of another, in a bucket of
// more than one.
template <typename Config>
__device__ __forceinline__ uint32_t difference(int32_t token, uint32_t value) {
  return ptx::masked_xor<Config::kUpper>(token, value);
}
template <typename Config>
__device__ __forceinline__ bool is_entry(uint32_t difference) {
  return (difference & (kEmpty >> Config::kEntryBits << Config::kEntryBits)) == 0;
}
template <typename Config>
__device__ __forceinline__ bool is_other_of_more(uint32_t difference) {
  return difference >= (kMore | 1u << Config::kEntryBits);
}

// f(entry) for each entry that selects `token`. Only where tokens are repeated is there more than one.
template <typename Config, typename F>
__device__ __forceinline__ void for_each_entry(SharedMemory<Config>& s, int32_t token, F f) {
#pragma unroll 1
  for (uint32_t value = bucket(s, token); value != kEmpty; value = s.next[entry_of<Config>(value)]) {
    if (is_entry<Config>(difference<Config>(token, value))) f(entry_of<Config>(value));
  }
}

// A thread sees to four neighbouring entries of the top-k at a time.
template <typename Config>
struct Selection {
  static constexpr int kRounds = ceil_div(Config::kEntries, 4 * Config::kThreads);
  int32_t tokens[4];

  __device__ __forceinline__ static int first(int round) { return (round * Config::kThreads + threadIdx.x) * 4; }
  __device__ __forceinline__ static bool has(int first) {
    return Config::kEntries % (4 * Config::kThreads) == 0 || first < Config::kEntries;
  }

  __device__ __forceinline__ void load(const int32_t* top_k, int round) {
    const int at = first(round);
    if (Config::kTopK % 4 == 0 && __builtin_expect(reinterpret_cast<uint64_t>(top_k) % 16 == 0, 1)) {
      int4 v = make_int4(-1, -1, -1, -1);
      if (Config::kTopK % (4 * Config::kThreads) == 0 || at < Config::kTopK) {
        v = ptx::load(reinterpret_cast<const int4*>(top_k + at));
      }
      tokens[0] = v.x, tokens[1] = v.y, tokens[2] = v.z, tokens[3] = v.w;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) tokens[k] = at + k < Config::kTopK ? ptx::load(top_k + at + k) : -1;
    }
  }

  __device__ __forceinline__ void insert(SharedMemory<Config>& s, const Request& r, int rank, int round) const {
    const int at = first(round);
    if (!has(at)) return;
    // Tokens from here on lie in the slot of the newest, in the extra page, or nowhere.
    const uint32_t looked_up = static_cast<uint32_t>(min(r.tail_start, r.seq_len - 1));
    reinterpret_cast<int4*>(s.selected)[round * Config::kThreads + threadIdx.x] =
        make_int4(tokens[0], tokens[1], tokens[2], tokens[3]);
    uint32_t earlier[4], largest = 0;  // what was in the bucket before this entry
#pragma unroll
    for (int k = 0; k < 4; ++k) largest = max(largest, static_cast<uint32_t>(tokens[k]));
    const auto put = [&](int k) {
      earlier[k] = atomicExch(&bucket(s, tokens[k]), value_of<Config>(tokens[k], at + k));
    };
    if (__builtin_expect(largest < looked_up, 1)) {
#pragma unroll
      for (int k = 0; k < 4; ++k) put(k);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        earlier[k] = kEmpty;
        if (static_cast<uint32_t>(tokens[k]) < looked_up) put(k);
      }
      settle(s, r, rank, at, looked_up);
    }
    bool shared = false;
#pragma unroll
    for (int k = 0; k < 4; ++k) shared |= earlier[k] != kEmpty;
    if (shared) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (earlier[k] != kEmpty) {
          s.next[at + k] = earlier[k] | kMore;
          atomicOr(&bucket(s, tokens[k]), kMore);
        }
      }
    }
  }

  // Entries that need no looking up: one block of the cluster answers for those of a word.
  __device__ __forceinline__ void settle(
      SharedMemory<Config>& s, const Request& r, int rank, int at, uint32_t looked_up) const {
    const bool own = at / 32 % Config::kCluster == rank;
    uint32_t bits = 0;
    int no_slot = 0;
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      const int32_t token = s.selected[at + k];
      if (static_cast<uint32_t>(token) < looked_up) continue;
      bits |= 1u << k;
      if (own && at + k < Config::kTopK) {
        const int slot = r.fixed_slot(token, Config::kHot);
        ptx::store(r.locs_out + at + k, r.loc(slot));
        no_slot += slot < 0;
      }
    }
    atomicOr(&s.settled[at / 32], bits << at % 32);
    atomicAdd(&s.not_looked_up, __popc(bits));
    if (no_slot != 0) atomicAdd(&s.no_slot, no_slot);
  }
};

// Goes down the chains, all at once, for a hop waits for the one before. found[k]: `difference`; where that is another
// token's entry and the bucket has more, the one looked for, if there is one.
template <typename Config, int kChains>
__device__ __forceinline__ void follow(
    const SharedMemory<Config>& s, const int32_t (&tokens)[kChains], uint32_t (&found)[kChains]) {
  const auto more = [&] {
    uint32_t largest = found[0];
#pragma unroll
    for (int k = 1; k < kChains; ++k) largest = max(largest, found[k]);
    return is_other_of_more<Config>(largest);
  };
#pragma unroll 1
  while (more()) {
    uint32_t next[kChains];
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      if (is_other_of_more<Config>(found[k])) next[k] = s.next[entry_of<Config>(found[k])];
    }
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      if (is_other_of_more<Config>(found[k])) found[k] = difference<Config>(tokens[k], next[k]);
    }
  }
}

// Whether a token stands in the top-k twice: then the later of its entries in a chain sees the earlier.
template <typename Config>
__device__ __forceinline__ void look_for_repeats(SharedMemory<Config>& s) {
#pragma unroll 1
  for (int round = 0; round < Selection<Config>::kRounds; ++round) {
    const int first = Selection<Config>::first(round);
    if (!Selection<Config>::has(first)) return;
    const int4 tokens = reinterpret_cast<const int4*>(s.selected)[round * Config::kThreads + threadIdx.x];
    const uint4 next = reinterpret_cast<const uint4*>(s.next)[round * Config::kThreads + threadIdx.x];
    const int32_t token[4] = {tokens.x, tokens.y, tokens.z, tokens.w};
    uint32_t found[4] = {difference<Config>(token[0], next.x), difference<Config>(token[1], next.y),
                         difference<Config>(token[2], next.z), difference<Config>(token[3], next.w)};
    if constexpr (!Config::kBitLeft) {  // a negative token is in no chain
      if (tokens.x < 0) found[0] = kEmpty;
      if (tokens.y < 0) found[1] = kEmpty;
      if (tokens.z < 0) found[2] = kEmpty;
      if (tokens.w < 0) found[3] = kEmpty;
    }
    follow<Config>(s, token, found);
    if (is_entry<Config>(found[0]) || is_entry<Config>(found[1]) || is_entry<Config>(found[2]) ||
        is_entry<Config>(found[3])) {
      s.repeated = 1;
    }
  }
}

// Of the entries of one token, one is answered: the one found in the buffer, or else the first, which takes a row. The
// blocks' chains are in different orders, but of the same entries.
template <typename Config>
__device__ __forceinline__ void settle_repeated(SharedMemory<Config>& s) {
  for (int i = threadIdx.x; i < Config::kEntries; i += Config::kThreads) {
    bool repeats = false;
    if ((s.settled[i / 32] >> i % 32 & 1) == 0) {
      for_each_entry(s, s.selected[i], [&](int j) { repeats |= j < i || (s.settled[j / 32] >> j % 32 & 1); });
    }
    const uint32_t bits = __ballot_sync(~0u, repeats);
    if (i % 32 == 0) s.repeats[i / 32] = bits;
  }
  __syncthreads();
  for_each<Config::kTopKWords, Config::kThreads>([&](int w) { s.settled[w] |= s.repeats[w]; });
}

template <typename Config>
__device__ __forceinline__ void answer_repeated(SharedMemory<Config>& s, const Request& r, int rank) {
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    if ((s.repeats[i / 32] >> i % 32 & 1) == 0) continue;
    for_each_entry(s, s.selected[i], [&](int j) {
      if ((s.repeats[j / 32] >> j % 32 & 1) == 0) ptx::store(r.locs_out + i, ptx::load(r.locs_out + j));
    });
  }
}

}  // namespace hisparse_plugin
