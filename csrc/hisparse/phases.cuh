// The steps of a swap-in, in order. `kernel.cuh` says which barrier stands between which.
#pragma once

#include <cstdint>

#include "../common/copy.cuh"
#include "../common/ptx.cuh"
#include "config.cuh"
#include "params.h"

namespace hisparse_plugin {

// The low half of an int64 stands first.
__device__ __forceinline__ int32_t load_index(const IndexArray& array, int at) {
  return ptx::load(reinterpret_cast<const int32_t*>(static_cast<const char*>(array.data) + at * array.element_bytes));
}

// f(i) for i in [0, kCount), dealt out to the threads of a block; unrolled, for the loads and stores of all to overlap.
template <int kCount, int kThreads, typename F>
__device__ __forceinline__ void for_each(F f) {
#pragma unroll
  for (int first = 0; first < kCount; first += kThreads) {
    const int i = first + threadIdx.x;
    if (kCount % kThreads == 0 || i < kCount) f(i);
  }
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

  // Slot of an entry that is not looked up: no token, or one whose slot follows from its position. -1: none.
  __device__ __forceinline__ int fixed_slot(int32_t token, int hot) const {
    if (token < 0 || token >= seq_len) return -1;
    const int slot = token >= tail_start ? hot + 1 + (token - tail_start) : min(token, hot);
    return slot < buffer_width ? slot : -1;
  }
  __device__ __forceinline__ int32_t loc(int slot) const { return slot < 0 ? -1 : ptx::load(buffer_locs + slot); }
};

__device__ __forceinline__ Request load_request(const SwapInParams& p, int row) {
  const bool real = p.num_real_reqs == nullptr || row < ptx::load(p.num_real_reqs);
  const int64_t slot = load_index(p.req_pool_indices, row);
  const int32_t seq_len = load_index(p.seq_lens, row);
  const int32_t tail_start = p.tail_start.data ? load_index(p.tail_start, row) : seq_len;
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
__device__ __forceinline__ uint32_t& bucket(SharedMemory<Config>& s, int32_t token) {
  return s.buckets[token & (Config::kBuckets - 1)];
}
template <typename Config>
__device__ __forceinline__ uint32_t upper_bits(int32_t token) {
  return static_cast<uint32_t>(token) >> Config::kBucketBits << Config::kIndexBits;
}
template <typename Config>
__device__ __forceinline__ int entry_of(uint32_t bucket) {
  return (bucket & ~kMore) == kEmpty ? -1 : static_cast<int>(bucket & ((1u << Config::kIndexBits) - 1));
}

// f(entry) for each entry that selects `token`. Only where tokens are repeated is there more than one.
template <typename Config, typename F>
__device__ __forceinline__ void for_each_entry(SharedMemory<Config>& s, int32_t token, F f) {
  for (int at = entry_of<Config>(bucket(s, token)); at >= 0; at = s.nodes[at].next) {
    if (s.nodes[at].token == token) f(at);
  }
}

// ---- phases -----------------------------------------------------------------------------------------------------

// Words of the hot buffer that a block looks up.
template <typename Config>
__device__ __forceinline__ int own_hot_words(int rank) {
  return max(0, min(Config::kHotWordsPerBlock, Config::kHotWords - rank * Config::kHotWordsPerBlock));
}

template <typename Config>
__device__ __forceinline__ void clear(SharedMemory<Config>& s, int rank) {
  static_assert(Config::kBuckets % 4 == 0);
  for_each<Config::kBuckets / 4, Config::kThreads>(
      [&](int i) { reinterpret_cast<int4*>(s.buckets)[i] = make_int4(kEmpty, kEmpty, kEmpty, kEmpty); });
  for_each<Config::kTopKWords * 32, Config::kThreads>([&](int i) { s.locs_out[i] = kNotFound; });
  if (threadIdx.x == 0) {
    s.not_looked_up = s.no_slot = s.repeated = s.hits_in_order = 0;
#pragma unroll
    for (int w = Config::kHot / 32; w < Config::kHotWords; ++w) s.hits[w] = 0;  // bits past the last slot stay 0
    if constexpr (Config::kCluster > 1) {
      ptx::mailbox_init(&s.hits_mailbox, (Config::kHotWords - own_hot_words<Config>(rank)) * 4);
      ptx::mailbox_init(&s.found_mailbox, Config::kCluster * Config::kTopKWords * 4);
    }
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
    if (i < Config::kTopK) r.locs_out[i] = locs[k];
  }
}

// Words of 32 entries or slots that a warp handles, kAtOnce of them in registers.
constexpr int at_once(int per_warp) { return per_warp < 8 ? per_warp : 8; }

// Each block puts the whole top-k into its own table, which costs less than one exchange between blocks.
template <typename Config>
struct Selection {
  static constexpr int kAtOnce = at_once(Config::kTopKPerWarp);
  int32_t tokens[kAtOnce];

  __device__ __forceinline__ static int word(int at) { return at * Config::kWarps + threadIdx.x / 32; }

  __device__ __forceinline__ void load(const int32_t* top_k, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int index = word(first + k) * 32 + threadIdx.x % 32;
      tokens[k] = index < Config::kTopK ? ptx::load(top_k + index) : -1;
    }
  }

  __device__ __forceinline__ void insert(SharedMemory<Config>& s, const Request& r, int rank, int first) {
    // Tokens from here on lie in the slot of the newest, in the extra page, or nowhere.
    const uint32_t looked_up = static_cast<uint32_t>(min(r.tail_start, r.seq_len - 1));
    uint32_t earlier[kAtOnce];  // what was in the bucket before this entry
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int index = word(first + k) * 32 + threadIdx.x % 32;
      earlier[k] = kEmpty;
      if (static_cast<uint32_t>(tokens[k]) < looked_up) {
        earlier[k] = atomicExch(&bucket(s, tokens[k]), upper_bits<Config>(tokens[k]) | index);
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int w = word(first + k), index = w * 32 + threadIdx.x % 32;
      if (w >= Config::kTopKWords) break;
      const bool settled = static_cast<uint32_t>(tokens[k]) >= looked_up;
      if (earlier[k] != kEmpty) atomicOr(&bucket(s, tokens[k]), kMore);
      s.nodes[index] = {settled ? -1 : tokens[k], entry_of<Config>(earlier[k])};
      const uint32_t bits = __ballot_sync(~0u, settled);
      if (threadIdx.x % 32 == 0) {
        s.settled[w] = bits;
        if (bits != 0) atomicAdd(&s.not_looked_up, __popc(bits));
      }
      if (bits != 0 && w % Config::kCluster == rank) answer(s, r, tokens[k], index, settled);
    }
  }

  // One block of the cluster answers for the entries of a word that need no looking up.
  __device__ __forceinline__ static void answer(
      SharedMemory<Config>& s, const Request& r, int32_t token, int index, bool settled) {
    if (!settled || index >= Config::kTopK) return;
    const int32_t loc = r.loc(r.fixed_slot(token, Config::kHot));
    r.locs_out[index] = loc;
    if (loc < 0) atomicAdd(&s.no_slot, 1);
  }
};

// Goes down the chains from the entries at[k], all at once, for a hop waits for the one before. found[k]: the entry of
// tokens[k], left as it is where there is none.
template <typename Config, int kChains>
__device__ __forceinline__ void follow(
    const SharedMemory<Config>& s, const int32_t (&tokens)[kChains], int (&at)[kChains], int (&found)[kChains]) {
  bool more = false;
#pragma unroll
  for (int k = 0; k < kChains; ++k) more |= at[k] >= 0;
  while (more) {
    Node node[kChains];
#pragma unroll
    for (int k = 0; k < kChains; ++k) node[k] = at[k] >= 0 ? s.nodes[at[k]] : Node{-1, -1};
    more = false;
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      const bool same = at[k] >= 0 && node[k].token == tokens[k];
      if (same) found[k] = at[k];
      at[k] = same ? -1 : node[k].next;
      more |= at[k] >= 0;
    }
  }
}

// The buffer slots that this block looks up.
template <typename Config>
struct Residents {
  static constexpr int kVector = Config::kVector, kGroupsAtOnce = std::min(Config::kGroupsPerWarp, 8 / kVector);
  static constexpr int kAtOnce = kGroupsAtOnce * kVector;
  int32_t tokens[kAtOnce], locs[kAtOnce];

  // A warp's groups of 32 kVector slots are neighbours. One past the last where it has no more.
  __device__ __forceinline__ static int group(int rank, int at) {
    const int g = threadIdx.x / 32 * Config::kGroupsPerWarp + at;
    const bool own = at < Config::kGroupsPerWarp && g < Config::kGroupsPerBlock;
    return min(own ? rank * Config::kGroupsPerBlock + g : INT_MAX, Config::kHotWords / kVector);
  }

  __device__ __forceinline__ void load(const Request& r, int rank, int first) {
    const auto from = [](const int32_t* row, int slot, int32_t* to) {
      if constexpr (kVector == 4) {
        if (reinterpret_cast<uint64_t>(row) % 16 == 0 && slot + kVector <= Config::kHot) {
          const int4 v = ptx::load(reinterpret_cast<const int4*>(row + slot));
          to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
          return;
        }
      }
#pragma unroll
      for (int c = 0; c < kVector; ++c) to[c] = slot + c < Config::kHot ? ptx::load(row + slot + c) : -1;
    };
#pragma unroll
    for (int g = 0; g < kGroupsAtOnce; ++g) {
      const int slot = (group(rank, first + g) * 32 + threadIdx.x % 32) * kVector;
      from(r.buffer_tokens, slot, tokens + g * kVector);
      from(r.buffer_locs, slot, locs + g * kVector);  // before it is known whether it is a hit
    }
  }

  __device__ __forceinline__ void look_up(SharedMemory<Config>& s, const Request& r, int rank) {
    for (int first = 0;; first += kGroupsAtOnce) {
      uint32_t head[kAtOnce];
      int found[kAtOnce], at[kAtOnce];  // `at`: an entry of another token, after which to look further
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) head[k] = bucket(s, tokens[k]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t entry = (head[k] ^ upper_bits<Config>(tokens[k])) & ~kMore;  // where the upper bits are the same
        const bool same = entry < 1u << Config::kIndexBits && tokens[k] >= 0;
        found[k] = same ? static_cast<int>(entry) : -1;
        at[k] = !same && head[k] & kMore ? entry_of<Config>(head[k]) : -1;
      }
      follow(s, tokens, at, found);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int w = group(rank, first + k / kVector) * kVector + k % kVector, lane = threadIdx.x % 32;
        const uint32_t hits = __ballot_sync(~0u, found[k] >= 0);
        if (w < Config::kHotWords) {
          if (lane == 0) s.hit_slots[w] = hits;
          if constexpr (Config::kCluster > 1) {
            if (lane < Config::kCluster && lane != rank) ptx::mail(&s.hit_slots[w], hits, &s.hits_mailbox, lane);
          }
        }
        if (found[k] >= 0) s.locs_out[found[k]] = locs[k];
      }
      if (first + kGroupsAtOnce >= Config::kGroupsPerWarp) return;
      load(r, rank, first + kGroupsAtOnce);
    }
  }
};

// Whether a token stands in the top-k twice: then the later of its entries in a chain sees the earlier.
template <typename Config>
__device__ __forceinline__ void look_for_repeats(SharedMemory<Config>& s) {
  constexpr int kAtOnce = Selection<Config>::kAtOnce;
  for (int first = 0; first < Config::kTopKPerWarp; first += kAtOnce) {
    int32_t tokens[kAtOnce];
    int at[kAtOnce], found[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int w = Selection<Config>::word(first + k);
      const Node node = w < Config::kTopKWords ? s.nodes[w * 32 + threadIdx.x % 32] : Node{-1, -1};
      tokens[k] = node.token;
      at[k] = node.next;
      found[k] = -1;
    }
    follow(s, tokens, at, found);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (found[k] >= 0) s.repeated = 1;
    }
  }
}

// Write the answers this block has found, side by side, and tell the others which they are.
template <typename Config>
__device__ __forceinline__ void answer_found(SharedMemory<Config>& s, const Request& r, int rank) {
  const int lane = threadIdx.x % 32;
#pragma unroll 4
  for (int at = 0; at < Config::kTopKPerWarp; ++at) {
    const int w = Selection<Config>::word(at), i = w * 32 + lane;
    if (w >= Config::kTopKWords) break;
    const int32_t loc = s.locs_out[i];
    const uint32_t bits = __ballot_sync(~0u, loc != kNotFound);
    if constexpr (Config::kCluster == 1) {
      if (lane == 0) s.found_by[0][w] = bits;
    } else {
      if (lane < Config::kCluster) ptx::mail(&s.found_by[rank][w], bits, &s.found_mailbox, lane);
    }
    if (loc != kNotFound) r.locs_out[i] = loc;
  }
}

// The LRU order as it was, for all to pick victims from.
template <typename Config>
__device__ __forceinline__ void load_lru(SharedMemory<Config>& s, const int16_t* lru) {
  if (Config::kHot % 8 == 0 && reinterpret_cast<uint64_t>(lru) % 16 == 0) {
    for_each<Config::kHot / 8, Config::kThreads>([&](int i) { ptx::copy_async_16(s.lru + i * 8, lru + i * 8); });
  } else {
    for (int i = threadIdx.x; i < Config::kHot; i += Config::kThreads) s.lru[i] = ptx::load(lru + i);
  }
}

// Put together what the blocks found.
template <typename Config>
__device__ __forceinline__ void merge_found(SharedMemory<Config>& s) {
  for_each<Config::kTopKWords, Config::kThreads>([&](int w) {
    uint32_t bits = s.settled[w];
#pragma unroll
    for (int b = 0; b < Config::kCluster; ++b) bits |= s.found_by[b][w];
    s.settled[w] = bits;
  });
}

template <typename Config>
__device__ __forceinline__ int count_unsettled(const SharedMemory<Config>& s) {
  int unsettled = 0;
  for (int w = threadIdx.x % 32; w < Config::kTopKWords; w += 32) unsettled += 32 - __popc(s.settled[w]);
  return __reduce_add_sync(~0u, unsettled);
}

// Of the entries of one token, one is answered: the one found in the buffer, or else the first, which takes a row. The
// blocks' chains are in different orders, but of the same entries.
template <typename Config>
__device__ __forceinline__ void settle_repeated(SharedMemory<Config>& s) {
  for (int i = threadIdx.x; i < Config::kTopKWords * 32; i += Config::kThreads) {
    const int32_t token = s.nodes[i].token;
    const bool answered = s.settled[i / 32] >> i % 32 & 1;
    bool repeats = false;
    if (token >= 0 && !answered) {
      for_each_entry(s, token, [&](int j) { repeats |= j < i || (s.settled[j / 32] >> j % 32 & 1); });
    }
    const uint32_t bits = __ballot_sync(~0u, repeats);
    if (i % 32 == 0) s.repeats[i / 32] = bits;
  }
  __syncthreads();
  for_each<Config::kTopKWords, Config::kThreads>([&](int w) { s.settled[w] |= s.repeats[w]; });
}

template <typename Config>
__device__ __forceinline__ uint32_t is_hit(const SharedMemory<Config>& s, uint32_t slot) {
  constexpr uint32_t kVector = Config::kVector;
  return s.hit_slots[slot / (32 * kVector) * kVector + slot % kVector] >> slot / kVector % 32 & 1;
}

// Which places in the LRU order hold a hit. A thread sees to eight places: one byte of `hits`.
template <typename Config>
__device__ __forceinline__ void order_hits(SharedMemory<Config>& s) {
  for_each<ceil_div(Config::kHot, 8), Config::kThreads>([&](int i) {
    const int4 slots = reinterpret_cast<const int4*>(s.lru)[i];
    const uint32_t pairs[4] = {uint32_t(slots.x), uint32_t(slots.y), uint32_t(slots.z), uint32_t(slots.w)};
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const uint32_t slot = pairs[k / 2] >> 16 * (k % 2) & 0xffff;
      if (Config::kHot % 8 == 0 || i * 8 + k < Config::kHot) bits |= is_hit(s, slot) << k;
    }
    reinterpret_cast<uint8_t*>(s.hits)[i] = static_cast<uint8_t>(bits);
  });
}

struct Totals {
  int misses;
  int kept;         // slots without a hit
  int hits_before;  // hits in the LRU order before the words that this warp writes
};

// Words of the LRU order that a warp writes: kHotPerWarp from here.
template <typename Config>
__device__ __forceinline__ int first_lru_word(int rank) {
  const int w = threadIdx.x / 32 * Config::kHotPerWarp;
  return w < Config::kHotWordsPerBlock ? rank * Config::kHotWordsPerBlock + w : Config::kHotWords;
}

template <typename Config>
__device__ __forceinline__ Totals total(const SharedMemory<Config>& s, int rank) {
  const int first = first_lru_word<Config>(rank);
  uint32_t sum = 0;  // all in the lower half, those before `first` in the upper
#pragma unroll 4
  for (int w = threadIdx.x % 32; w < Config::kHotWords; w += 32) {
    const uint32_t hits = __popc(s.hits[w]);
    sum += hits + (w < first ? hits << 16 : 0);
  }
  sum = __reduce_add_sync(~0u, sum);
  const int hits = sum & 0xffff;
  return {Config::kTopKWords * 32 - s.not_looked_up - hits, Config::kHot - hits, static_cast<int>(sum >> 16)};
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
    miss.token = s.nodes[miss.index].token;
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
__device__ __forceinline__ void write_lru(
    const SharedMemory<Config>& s, int16_t* lru, int rank, const Totals& totals) {
  const int lane = threadIdx.x % 32, kept = totals.kept, misses = totals.misses;
  const int first = first_lru_word<Config>(rank);
  int hits_before = totals.hits_before;
#pragma unroll 4
  for (int at = 0; at < Config::kHotPerWarp; ++at) {
    const int w = first + at, position = w * 32 + lane;
    if (w >= min(Config::kHotWords, (rank + 1) * Config::kHotWordsPerBlock)) return;
    const uint32_t hits = s.hits[w];
    const int hit_rank = hits_before + __popc(hits & ((1u << lane) - 1)), other_rank = position - hit_rank;
    const int to = hits >> lane & 1         ? kept + hit_rank
                   : other_rank < misses ? kept - misses + other_rank
                                         : other_rank - misses;
    if (Config::kHot % 32 == 0 || position < Config::kHot) lru[to] = s.lru[position];
    hits_before += __popc(hits);
  }
}

template <typename Config>
__device__ __forceinline__ void answer_repeated(SharedMemory<Config>& s, const Request& r, int rank) {
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    if ((s.repeats[i / 32] >> i % 32 & 1) == 0) continue;
    for_each_entry(s, s.nodes[i].token, [&](int j) {
      if ((s.repeats[j / 32] >> j % 32 & 1) == 0) r.locs_out[i] = ptx::load(r.locs_out + j);
    });
  }
}

}  // namespace hisparse_plugin
