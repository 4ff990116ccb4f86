// The steps of a swap-in, in order. `kernel.cuh` says which barrier stands between which.
#pragma once

#include <cstdint>

#include "../common/copy.cuh"
#include "../common/ptx.cuh"
#include "config.cuh"
#include "params.h"

namespace hisparse_plugin {

__device__ __forceinline__ int64_t load_index(const IndexArray& array, int at) {
  return array.wide ? ptx::load(static_cast<const int64_t*>(array.data) + at)
                    : ptx::load(static_cast<const int32_t*>(array.data) + at);
}

// One request, as every block of its cluster sees it.
struct Request {
  const int32_t* buffer_locs;
  const int64_t* host_locs;
  int32_t* buffer_tokens;
  int16_t* lru;
  int32_t* locs_out;
  int32_t seq_len, tail_start, buffer_width;
  bool real;  // false: a row that pads the batch to a captured size; its tables are not to be touched

  // A token whose slot follows from its position alone, or -1.
  __device__ __forceinline__ int fixed_slot(int32_t token, int hot) const {
    if (token >= tail_start) return hot + 1 + (token - tail_start);
    if (seq_len <= hot) return token;
    return token == seq_len - 1 ? hot : -1;
  }
  __device__ __forceinline__ bool is_token(int32_t token) const { return token >= 0 && token < seq_len; }
  __device__ __forceinline__ int32_t loc(int slot) const {
    return slot < buffer_width ? ptx::load(buffer_locs + slot) : -1;
  }
};

__device__ __forceinline__ Request load_request(const SwapInParams& p, int row) {
  const bool real = p.num_real_reqs == nullptr || row < ptx::load(p.num_real_reqs);
  const int64_t slot = load_index(p.req_pool_indices, row);
  const int32_t seq_len = static_cast<int32_t>(load_index(p.seq_lens, row));
  const int32_t tail_start = p.tail_start.data ? static_cast<int32_t>(load_index(p.tail_start, row)) : seq_len;
  return {p.device_buffer_locs + slot * p.buffer_locs_stride,
          p.host_cache_locs + slot * p.host_locs_stride,
          p.device_buffer_tokens + slot * p.buffer_tokens_stride,
          p.lru_slots + slot * p.lru_stride,
          p.top_k_device_locs + row * p.locs_out_stride,
          seq_len,
          tail_start,
          p.buffer_width,
          real};
}

// ---- the hash table of selected tokens --------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ uint32_t table_start(int32_t token) {
  return (static_cast<uint32_t>(token) * 2654435761u) >> (32 - Config::kTableBits);
}

// Tags tell tokens apart up to position 2^kTagBits; `exact` false asks for a comparison of the tokens themselves.
template <typename Config>
__device__ __forceinline__ bool holds(const SharedMemory<Config>& s, uint32_t entry, int32_t token, bool exact) {
  constexpr uint32_t kTagMask = (1u << Config::kTagBits) - 1;
  return entry >> Config::kIndexBits == (static_cast<uint32_t>(token) & kTagMask) &&
         (exact || s.tokens[entry & ((1u << Config::kIndexBits) - 1)] == token);
}

// Of a repeated token the lowest index stays.
template <typename Config>
__device__ __forceinline__ void insert(SharedMemory<Config>& s, int32_t token, int index, bool exact) {
  constexpr uint32_t kTagMask = (1u << Config::kTagBits) - 1;
  const uint32_t entry = (static_cast<uint32_t>(token) & kTagMask) << Config::kIndexBits | index;
  for (uint32_t at = table_start<Config>(token);; at = (at + 1) % Config::kTableSize) {
    const uint32_t old = atomicCAS(&s.table[at], Config::kEmpty, entry);
    if (old == Config::kEmpty) return;
    if (holds(s, old, token, exact)) {
      atomicMin(&s.table[at], entry);
      s.repeated = 1;
      return;
    }
  }
}

// Index of a token's first occurrence in the top-k, or -1.
template <typename Config>
__device__ __forceinline__ int find(const SharedMemory<Config>& s, int32_t token, bool exact) {
  for (uint32_t at = table_start<Config>(token);; at = (at + 1) % Config::kTableSize) {
    const uint32_t entry = s.table[at];
    if (entry == Config::kEmpty) return -1;
    if (holds(s, entry, token, exact)) return entry & ((1u << Config::kIndexBits) - 1);
  }
}

// ---- phases -----------------------------------------------------------------------------------------------------

template <typename Config>
__device__ __forceinline__ void clear(SharedMemory<Config>& s, int rank) {
  static_assert(Config::kTableSize % 4 == 0);
  auto* table = reinterpret_cast<uint4*>(s.table);
  for (int i = threadIdx.x; i < Config::kTableSize / 4; i += Config::kThreads) {
    table[i] = make_uint4(Config::kEmpty, Config::kEmpty, Config::kEmpty, Config::kEmpty);
  }
  for (int i = threadIdx.x; i < Config::kTopKWords; i += Config::kThreads) s.found_by[rank][i] = 0;
  if (threadIdx.x == 0) s.no_slot = s.repeated = 0;
}

// No token, or one with a fixed slot. True: this entry is settled; the block that owns its word writes the answer.
template <typename Config>
__device__ __forceinline__ bool settle_entry(const Request& r, int32_t token, int index, bool owner, bool& no_slot) {
  const int slot = r.is_token(token) ? r.fixed_slot(token, Config::kHot) : -1;
  const bool settled = slot >= 0 || !r.is_token(token);
  no_slot = settled && (slot < 0 || slot >= r.buffer_width);
  if (settled && owner) r.locs_out[index] = slot < 0 ? -1 : r.loc(slot);
  return settled;
}

// Padding, and sequences the buffer holds whole, in order: no tables but the locs are read, none is written.
template <typename Config>
__device__ __forceinline__ void answer_from_positions(
    const SwapInParams& p, const Request& r, const int32_t* top_k, int rank) {
  const int row = blockIdx.x / Config::kCluster;
  if (p.miss_count && rank == 0 && threadIdx.x == 0) p.miss_count[row] = 0;
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    const int32_t token = r.real ? ptx::load(top_k + i) : -1;
    const int32_t loc = r.is_token(token) ? r.loc(r.fixed_slot(token, Config::kHot)) : -1;
    r.locs_out[i] = loc;
    if (p.counters && loc >= 0) atomicAdd(&p.counters[0], 1ull);
  }
}

// Each block puts the whole top-k into its own table, which costs less than one exchange between blocks.
template <typename Config>
struct Selection {
  static constexpr int kPerWarp = ceil_div(Config::kTopKWords, Config::kWarps);
  static constexpr int kAtOnce = kPerWarp < 4 ? kPerWarp : 4;
  int32_t tokens[kAtOnce];

  __device__ __forceinline__ void load(const int32_t* top_k, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int index = ((first + k) * Config::kWarps + threadIdx.x / 32) * 32 + threadIdx.x % 32;
      tokens[k] = index < Config::kTopK ? ptx::load(top_k + index) : -1;
    }
  }

  __device__ __forceinline__ void insert_all(
      SharedMemory<Config>& s, const Request& r, const int32_t* top_k, int rank, bool exact) {
    const int lane = threadIdx.x % 32;
    for (int first = 0;; first += kAtOnce) {
      uint32_t searched = 0;  // bit k: tokens[k] is looked up
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int word = (first + k) * Config::kWarps + threadIdx.x / 32, index = word * 32 + lane;
        if (word >= Config::kTopKWords) break;
        bool no_slot = false, settled = true;
        if (index < Config::kTopK) {
          settled = settle_entry<Config>(r, tokens[k], index, word % Config::kCluster == rank, no_slot);
        }
        s.tokens[index] = settled ? -1 : tokens[k];
        searched |= static_cast<uint32_t>(!settled) << k;
        const uint32_t settled_bits = __ballot_sync(~0u, settled), no_slot_bits = __ballot_sync(~0u, no_slot);
        if (lane == 0) {
          s.settled[word] = settled_bits;
          if (no_slot_bits != 0) atomicAdd(&s.no_slot, __popc(no_slot_bits));
        }
      }
      if (!exact) __syncthreads();  // tags do not suffice: tokens are compared, so they must all be there
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int index = ((first + k) * Config::kWarps + threadIdx.x / 32) * 32 + lane;
        if (searched >> k & 1) insert(s, tokens[k], index, exact);
      }
      if (first + kAtOnce >= kPerWarp) return;
      load(top_k, first + kAtOnce);
    }
  }
};

// The buffer slots this block looks up: kHotWordsPerBlock words of the LRU order, starting at its rank's.
template <typename Config>
struct Residents {
  static constexpr int kAtOnce = Config::kHotGroups < 4 ? Config::kHotGroups : 4;
  int16_t slots[kAtOnce];
  int32_t tokens[kAtOnce], locs[kAtOnce];

  __device__ __forceinline__ static int word(int rank, int group) {
    const int w = group * Config::kWarps + threadIdx.x / 32;
    return w < Config::kHotWordsPerBlock ? rank * Config::kHotWordsPerBlock + w : Config::kHotWords;
  }

  __device__ __forceinline__ void load(const Request& r, int rank, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int position = word(rank, first + k) * 32 + threadIdx.x % 32;
      slots[k] = position < Config::kHot ? ptx::load(r.lru + position) : int16_t(-1);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      tokens[k] = slots[k] >= 0 ? ptx::load(r.buffer_tokens + slots[k]) : -1;
      locs[k] = slots[k] >= 0 ? ptx::load(r.buffer_locs + slots[k]) : -1;  // before it is known whether it is a hit
    }
  }

  __device__ __forceinline__ void look_up(SharedMemory<Config>& s, const Request& r, int rank, bool exact) {
    const int lane = threadIdx.x % 32;
    for (int first = 0;; first += kAtOnce) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int w = word(rank, first + k);
        if (w >= Config::kHotWords) break;
        const int index = tokens[k] >= 0 ? find(s, tokens[k], exact) : -1;
        if (index >= 0) {
          atomicOr(&s.found_by[rank][index / 32], 1u << index % 32);
          r.locs_out[index] = locs[k];
        }
        const uint32_t hits = __ballot_sync(~0u, index >= 0);
        if (lane == 0) s.hits[w] = hits;
      }
      if (first + kAtOnce >= Config::kHotGroups) return;
      load(r, rank, first + kAtOnce);
    }
  }
};

// The LRU order as it was, for all to pick victims from.
template <typename Config>
__device__ __forceinline__ void load_lru(SharedMemory<Config>& s, const int16_t* lru) {
  if (Config::kHot % 8 == 0 && reinterpret_cast<uint64_t>(lru) % 16 == 0) {
    for (int i = threadIdx.x * 8; i < Config::kHot; i += Config::kThreads * 8) ptx::copy_async_16(s.lru + i, lru + i);
  } else {
    for (int i = threadIdx.x; i < Config::kHot; i += Config::kThreads) s.lru[i] = ptx::load(lru + i);
  }
}

// Entries that repeat an earlier one take no row of their own.
template <typename Config>
__device__ __forceinline__ void settle_repeated(SharedMemory<Config>& s, bool exact) {
  for (int i = threadIdx.x; i < Config::kTopKWords * 32; i += Config::kThreads) {
    const bool repeats = s.tokens[i] >= 0 && find(s, s.tokens[i], exact) != i;
    const uint32_t bits = __ballot_sync(~0u, repeats);
    if (i % 32 == 0) s.settled[i / 32] |= bits;
  }
}

// Send what this block found to the others: its own words of `hits`, and its row of `found_by`.
template <typename Config>
__device__ __forceinline__ void tell_cluster(SharedMemory<Config>& s, int rank) {
  constexpr int kOwn = Config::kHotWordsPerBlock, kAll = kOwn + Config::kTopKWords;
  for (int i = threadIdx.x; i < kAll * Config::kCluster; i += Config::kThreads) {
    const int peer = i / kAll, word = i % kAll;
    if (peer == rank) continue;
    if (word >= kOwn) {
      uint32_t* bits = &s.found_by[rank][word - kOwn];
      ptx::store_remote(bits, peer, *bits);
    } else if (rank * kOwn + word < Config::kHotWords) {
      uint32_t* bits = &s.hits[rank * kOwn + word];
      ptx::store_remote(bits, peer, *bits);
    }
  }
}

// before[w] = sum of count(0 .. w-1), before[words] = the total. One warp.
template <int kWords, typename Count>
__device__ __forceinline__ void prefix_sum(int32_t* before, Count count) {
  constexpr int kPerLane = ceil_div(kWords, 32);
  const int lane = threadIdx.x % 32;
  int32_t own[kPerLane], sum = 0;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int w = lane * kPerLane + k;
    own[k] = w < kWords ? count(w) : 0;
    sum += own[k];
  }
  int32_t upto = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t lower = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += lower;
  }
  if (lane == 31) before[kWords] = upto;
  upto -= sum;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int w = lane * kPerLane + k;
    if (w < kWords) before[w] = upto;
    upto += own[k];
  }
}

template <typename Config>
__device__ __forceinline__ void count(SharedMemory<Config>& s) {
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    prefix_sum<Config::kTopKWords>(s.misses_before, [&](int w) {
      uint32_t bits = s.settled[w];
#pragma unroll
      for (int b = 0; b < Config::kCluster; ++b) bits |= s.found_by[b][w];
      s.settled[w] = bits;
      return 32 - __popc(bits);
    });
  } else if (warp == 1) {
    prefix_sum<Config::kHotWords>(s.hits_before, [&](int w) { return __popc(s.hits[w]); });
  }
}

// Position of the n-th (from 0) zero bit, given how many zeros lie before each word.
template <int kWords, typename ZerosBefore>
__device__ __forceinline__ int nth_zero(const uint32_t* bits, int n, ZerosBefore zeros_before) {
  int word = 0;
#pragma unroll
  for (int step = 1 << ceil_log2(kWords); step > 0; step /= 2) {
    if (word + step < kWords && zeros_before(word + step) <= n) word += step;
  }
  n -= zeros_before(word);
  uint32_t zeros = ~bits[word];
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

// The misses of one request, dealt out to the warps of its cluster: in round n, lane l of warp w takes miss
// (32 n + l) * all warps + w. Neighbouring misses go to different blocks.
template <typename Config>
struct Work {
  static constexpr int kWarps = Config::kCluster * Config::kWarps;
  int misses, first;

  struct Miss {
    int64_t host_row;
    int32_t device_row, token;
    int index, slot;
  };

  __device__ __forceinline__ Work(const SharedMemory<Config>& s, int rank)
      : misses(s.misses_before[Config::kTopKWords]), first(threadIdx.x / 32 * Config::kCluster + rank) {}
  __device__ __forceinline__ bool has(int round) const { return first + round * 32 * kWarps < misses; }
  __device__ __forceinline__ int number(int round) const { return first + (round * 32 + threadIdx.x % 32) * kWarps; }

  // Miss m is the m-th unsettled entry and takes the m-th slot in LRU order that no hit keeps.
  __device__ __forceinline__ Miss place(
      const SharedMemory<Config>& s, const SwapInParams& p, const Request& r, int round) const {
    const int m = number(round);
    if (m >= misses) return {};
    Miss miss;
    miss.index = nth_zero<Config::kTopKWords>(s.settled, m, [&](int w) { return s.misses_before[w]; });
    miss.slot = s.lru[nth_zero<Config::kHotWords>(s.hits, m, [&](int w) { return w * 32 - s.hits_before[w]; })];
    miss.token = s.tokens[miss.index];
    miss.host_row = ptx::load(r.host_locs + miss.token);
    miss.device_row = ptx::load(r.buffer_locs + miss.slot);
    return miss;
  }

  __device__ __forceinline__ void record(
      const Miss& miss, const SwapInParams& p, const Request& r, int row, int round) const {
    const int m = number(round);
    if (m >= misses) return;
    r.buffer_tokens[miss.slot] = miss.token;
    r.locs_out[miss.index] = miss.device_row;
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

// New order: slots nobody asked for, then the just-loaded, then the hits; each keeps its old order.
template <typename Config>
__device__ __forceinline__ void write_lru(const SharedMemory<Config>& s, int16_t* lru, int rank, int misses) {
  const int kept = Config::kHot - s.hits_before[Config::kHotWords];  // slots without a hit
  for (int group = 0; group < Config::kHotGroups; ++group) {
    const int w = Residents<Config>::word(rank, group), position = w * 32 + threadIdx.x % 32;
    if (w >= Config::kHotWords || position >= Config::kHot) continue;
    const uint32_t hits = s.hits[w], lane_bit = 1u << threadIdx.x % 32;
    const int hit_rank = s.hits_before[w] + __popc(hits & (lane_bit - 1)), other_rank = position - hit_rank;
    const int to = hits & lane_bit        ? kept + hit_rank
                   : other_rank < misses ? kept - misses + other_rank
                                         : other_rank - misses;
    lru[to] = s.lru[position];
  }
}

template <typename Config>
__device__ __forceinline__ void report(const SharedMemory<Config>& s, const SwapInParams& p, int row, int misses) {
  if (p.miss_count) p.miss_count[row] = misses;
  if (p.counters) {
    atomicAdd(&p.counters[0], static_cast<unsigned long long>(Config::kTopK - s.no_slot - misses));
    atomicAdd(&p.counters[1], static_cast<unsigned long long>(misses));
    atomicAdd(&p.counters[2], static_cast<unsigned long long>(misses) * p.row_bytes);
  }
}

template <typename Config>
__device__ __forceinline__ void answer_repeated(const SharedMemory<Config>& s, const Request& r, int rank, bool exact) {
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    if (s.tokens[i] < 0) continue;
    const int first = find(s, s.tokens[i], exact);
    if (first != i) r.locs_out[i] = ptx::load(r.locs_out + first);
  }
}

}  // namespace hisparse_plugin
