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

  // Device row of an entry that is not looked up: no token, or one whose slot follows from its position. -1: none.
  __device__ __forceinline__ int32_t fixed_loc(int32_t token, int hot) const {
    if (token < 0 || token >= seq_len) return -1;
    const int slot = token >= tail_start ? hot + 1 + (token - tail_start) : min(token, hot);
    return slot < buffer_width ? ptx::load(buffer_locs + slot) : -1;
  }
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
__device__ __forceinline__ int32_t& bucket(SharedMemory<Config>& s, int32_t token) {
  return s.buckets[(static_cast<uint32_t>(token) * 2654435761u) >> (32 - Config::kBucketBits)];
}

// Follows kChains chains at once, for a hop waits for the one before. found[k]: the lowest index of tokens[k] along the
// chain that begins with entry at[k], -1 if it is not there.
template <typename Config, int kChains>
__device__ __forceinline__ void follow(
    const SharedMemory<Config>& s, const int32_t (&tokens)[kChains], int32_t (&at)[kChains],
    int32_t (&found)[kChains]) {
  uint32_t lowest[kChains];
#pragma unroll
  for (int k = 0; k < kChains; ++k) lowest[k] = ~0u;
  for (bool more = true; more;) {
    more = false;
    Node node[kChains];
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      node[k].next = -1;
      if (at[k] >= 0) node[k] = s.nodes[at[k]];
    }
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
      if (at[k] >= 0 && node[k].token == tokens[k]) lowest[k] = min(lowest[k], static_cast<uint32_t>(at[k]));
      at[k] = node[k].next;
      more |= at[k] >= 0;
    }
  }
#pragma unroll
  for (int k = 0; k < kChains; ++k) found[k] = static_cast<int32_t>(lowest[k]);
}

template <typename Config>
__device__ __forceinline__ int find(const SharedMemory<Config>& s, int32_t token, int32_t first) {
  const int32_t tokens[1] = {token};
  int32_t at[1] = {first}, found[1];
  follow(s, tokens, at, found);
  return found[0];
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
      [&](int i) { reinterpret_cast<int4*>(s.buckets)[i] = make_int4(-1, -1, -1, -1); });
  if constexpr (Config::kCluster == 1) {
    for_each<Config::kTopKWords * 32, Config::kThreads>([&](int i) { s.locs_out[i] = kNotFound; });
  } else {
    for_each<Config::kTopKWords, Config::kThreads>([&](int i) { s.found_by[rank][i] = 0; });
  }
  if (threadIdx.x == 0) {
    s.repeated_by[rank] = s.no_slot = 0;
    s.hits[Config::kHotWords - 1] = 0;  // bits past the last slot stay 0
    if constexpr (Config::kCluster > 1) {
      constexpr int kPeers = Config::kCluster - 1;
      const int words = Config::kHotWords - own_hot_words<Config>(rank) + kPeers * (Config::kTopKWords + 1);
      ptx::mailbox_init(&s.mailbox, words * 4);
    }
  }
}

// Lanes 0 .. 4 of one warp count a request: one instruction. `hits` may be of a part of the request.
__device__ __forceinline__ void count_request(const SwapInParams& p, int hits, int misses) {
  const int lane = threadIdx.x % 32;
  const int bits = min(32 - __clz(misses), kCounters - kMissCounters - 1);
  const int64_t add = lane == 0 ? hits : lane == 1 ? misses : lane == 2 ? int64_t{misses} * p.row_bytes : 1;
  const int at = lane < kMissCounters ? lane : kMissCounters + bits;
  if (lane <= kMissCounters && add != 0) atomicAdd(p.counters + at, static_cast<unsigned long long>(add));
}

// Padding, and sequences the buffer holds whole, in order: no tables but the locs are read, none is written.
template <typename Config>
__device__ __forceinline__ void answer_from_positions(
    const SwapInParams& p, const Request& r, const int32_t* top_k, int rank) {
  const int row = blockIdx.x / Config::kCluster;
  if (p.miss_count && rank == 0 && threadIdx.x == 0) p.miss_count[row] = 0;
  int hits = 0;
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    const int32_t loc = r.real ? r.fixed_loc(ptx::load(top_k + i), Config::kHot) : -1;
    r.locs_out[i] = loc;
    hits += loc >= 0;
  }
  if (!p.counters || !r.real) return;
  hits = __reduce_add_sync(~0u, hits);
  if (rank == 0 && threadIdx.x < 32) {
    count_request(p, hits, 0);
  } else if (threadIdx.x % 32 == 0 && hits != 0) {
    atomicAdd(p.counters, static_cast<unsigned long long>(hits));
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
    int32_t earlier[kAtOnce];  // entry that was first in the bucket before this one
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int index = word(first + k) * 32 + threadIdx.x % 32;
      earlier[k] = -1;
      if (static_cast<uint32_t>(tokens[k]) < looked_up) earlier[k] = atomicExch(&bucket(s, tokens[k]), index);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int w = word(first + k), index = w * 32 + threadIdx.x % 32;
      if (w >= Config::kTopKWords) break;
      const bool settled = static_cast<uint32_t>(tokens[k]) >= looked_up;
      s.nodes[index] = {settled ? -1 : tokens[k], earlier[k]};
      const uint32_t bits = __ballot_sync(~0u, settled);
      if (threadIdx.x % 32 == 0) s.settled[w] = bits;
      if (bits != 0 && w % Config::kCluster == rank) answer(s, r, tokens[k], index, settled);
    }
  }

  // One block of the cluster answers for the entries of a word that need no looking up.
  __device__ __forceinline__ static void answer(
      SharedMemory<Config>& s, const Request& r, int32_t token, int index, bool settled) {
    if (!settled || index >= Config::kTopK) return;
    const int32_t loc = r.fixed_loc(token, Config::kHot);
    r.locs_out[index] = loc;
    if (loc < 0) atomicAdd(&s.no_slot, 1);
  }
};

// The buffer slots that this block looks up, in the order of the slots: kHotWordsPerBlock words of 32.
template <typename Config>
struct Residents {
  static constexpr int kAtOnce = at_once(Config::kHotPerWarp);
  int32_t tokens[kAtOnce], locs[kAtOnce];

  // A warp's words are neighbours.
  __device__ __forceinline__ static int word(int rank, int at) {
    const int w = threadIdx.x / 32 * Config::kHotPerWarp + at;
    return at < Config::kHotPerWarp && w < Config::kHotWordsPerBlock ? rank * Config::kHotWordsPerBlock + w
                                                                     : Config::kHotWords;
  }

  __device__ __forceinline__ void load(const Request& r, int rank, int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int slot = word(rank, first + k) * 32 + threadIdx.x % 32;
      tokens[k] = slot < Config::kHot ? ptx::load(r.buffer_tokens + slot) : -1;
      locs[k] = slot < Config::kHot ? ptx::load(r.buffer_locs + slot) : -1;  // before it is known whether it is a hit
    }
  }

  __device__ __forceinline__ void look_up(SharedMemory<Config>& s, const Request& r, int rank) {
    for (int first = 0;; first += kAtOnce) {
      int32_t at[kAtOnce], found[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) at[k] = tokens[k] >= 0 ? bucket(s, tokens[k]) : -1;
      follow(s, tokens, at, found);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int w = word(rank, first + k);
        if (found[k] >= 0) {
          if constexpr (Config::kCluster == 1) {
            s.locs_out[found[k]] = locs[k];
          } else {
            atomicOr(&s.found_by[rank][found[k] / 32], 1u << found[k] % 32);
            r.locs_out[found[k]] = locs[k];
          }
        }
        const uint32_t hits = __ballot_sync(~0u, found[k] >= 0);
        if (threadIdx.x % 32 == 0 && w < Config::kHotWords) s.hit_slots[w] = hits;
      }
      if (first + kAtOnce >= Config::kHotPerWarp) return;
      load(r, rank, first + kAtOnce);
    }
  }
};

// Whether a token stands in the top-k twice. Each block sees to a share of the entries, and each has chains in an order
// of its own: so the later entry has to look for the earlier one from the top. A block alone need not.
template <typename Config>
__device__ __forceinline__ void look_for_repeats(SharedMemory<Config>& s, int rank) {
  constexpr int kStep = Config::kWarps * Config::kCluster;
  for (int w = threadIdx.x / 32 * Config::kCluster + rank; w < Config::kTopKWords; w += kStep) {
    const int i = w * 32 + threadIdx.x % 32;
    const Node node = s.nodes[i];
    if (node.token < 0) continue;
    const bool repeats = Config::kCluster == 1 ? find(s, node.token, node.next) >= 0
                                               : find(s, node.token, bucket(s, node.token)) != i;
    if (repeats) s.repeated_by[rank] = 1;
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

// Send what this block found to the others: its words of `hit_slots`, its row of `found_by`, and `repeated_by`.
template <typename Config>
__device__ __forceinline__ void tell_cluster(SharedMemory<Config>& s, int rank) {
  constexpr int kWarpsPerPeer = Config::kWarps / Config::kCluster;
  const int warp = threadIdx.x / 32, peer = warp % Config::kCluster;
  const int lane = warp / Config::kCluster * 32 + threadIdx.x % 32;  // among the warps that write to this peer
  if (peer == rank || lane >= kWarpsPerPeer * 32) return;
  const auto send = [&](uint32_t* words, int count) {
    for (int i = lane; i < count; i += kWarpsPerPeer * 32) ptx::mail(words + i, words[i], &s.mailbox, peer);
  };
  send(s.hit_slots + rank * Config::kHotWordsPerBlock, own_hot_words<Config>(rank));
  send(s.found_by[rank], Config::kTopKWords);
  send(&s.repeated_by[rank], 1);
}

template <typename Config>
__device__ __forceinline__ bool any_repeated(const SharedMemory<Config>& s) {
  uint32_t any = 0;
#pragma unroll
  for (int b = 0; b < Config::kCluster; ++b) any |= s.repeated_by[b];
  return any != 0;
}

// Entries that repeat an earlier one take no row of their own.
template <typename Config>
__device__ __forceinline__ void settle_repeated(SharedMemory<Config>& s) {
  for (int i = threadIdx.x; i < Config::kTopKWords * 32; i += Config::kThreads) {
    const int32_t token = s.nodes[i].token;
    const uint32_t bits = __ballot_sync(~0u, token >= 0 && find(s, token, bucket(s, token)) != i);
    if (i % 32 == 0) s.settled[i / 32] |= bits;
  }
}

// Put together what the blocks found. A block alone kept its answers back, to write them side by side.
template <typename Config>
__device__ __forceinline__ void merge_found(SharedMemory<Config>& s, const Request& r) {
  if constexpr (Config::kCluster == 1) {
#pragma unroll
    for (int at = 0; at < Config::kTopKPerWarp; ++at) {
      const int w = Selection<Config>::word(at), i = w * 32 + threadIdx.x % 32;
      if (w >= Config::kTopKWords) break;
      const int32_t loc = s.locs_out[i];
      if (loc != kNotFound) r.locs_out[i] = loc;
      const uint32_t bits = __ballot_sync(~0u, loc != kNotFound);
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
      if (Config::kHot % 8 == 0 || i * 8 + k < Config::kHot) bits |= (s.hit_slots[slot / 32] >> slot % 32 & 1) << k;
    }
    reinterpret_cast<uint8_t*>(s.hits)[i] = static_cast<uint8_t>(bits);
  });
}

// Sum of f(w) over the words [0, kWords), for every lane of a warp.
template <int kWords, typename F>
__device__ __forceinline__ int sum_words(F f) {
  int sum = 0;
#pragma unroll 4
  for (int w = threadIdx.x % 32; w < kWords; w += 32) sum += f(w);
  return __reduce_add_sync(~0u, sum);
}

struct Totals {
  int misses;
  int kept;         // slots without a hit
  int hits_before;  // hits in the LRU order before the words that this warp writes
};

template <typename Config>
__device__ __forceinline__ Totals total(const SharedMemory<Config>& s, int rank) {
  const int first = Residents<Config>::word(rank, 0);
  const int misses = sum_words<Config::kTopKWords>([&](int w) { return 32 - __popc(s.settled[w]); });
  const int hits = sum_words<Config::kHotWords>([&](int w) { return __popc(s.hits[w]); });
  const int before = sum_words<Config::kHotWords>([&](int w) { return w < first ? __popc(s.hits[w]) : 0; });
  return {misses, Config::kHot - hits, before};
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
    prefix_sum<Config::kTopKWords>(s.misses_before, [&](int w) { return 32 - __popc(s.settled[w]); });
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

  __device__ __forceinline__ Work(int misses, int rank)
      : misses(misses), first(threadIdx.x / 32 * Config::kCluster + rank) {}
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
  int hits_before = totals.hits_before;
#pragma unroll 4
  for (int at = 0; at < Config::kHotPerWarp; ++at) {
    const int w = Residents<Config>::word(rank, at), position = w * 32 + lane;
    if (w >= Config::kHotWords) return;
    const uint32_t hits = s.hits[w];
    const int hit_rank = hits_before + __popc(hits & ((1u << lane) - 1)), other_rank = position - hit_rank;
    const int to = hits >> lane & 1         ? kept + hit_rank
                   : other_rank < misses ? kept - misses + other_rank
                                         : other_rank - misses;
    if (Config::kHot % 32 == 0 || position < Config::kHot) lru[to] = s.lru[position];
    hits_before += __popc(hits);
  }
}

// One warp of each block.
template <typename Config>
__device__ __forceinline__ void report(
    const SharedMemory<Config>& s, const SwapInParams& p, int row, int rank, int misses) {
  if (rank == 0 && p.miss_count && threadIdx.x == 0) p.miss_count[row] = misses;
  if (!p.counters) return;
  if (rank == 0) {
    count_request(p, Config::kTopK - misses - s.no_slot, misses);
  } else if (threadIdx.x == 0 && s.no_slot != 0) {
    atomicAdd(p.counters, 0ull - s.no_slot);
  }
}

template <typename Config>
__device__ __forceinline__ void answer_repeated(SharedMemory<Config>& s, const Request& r, int rank) {
  for (int i = rank * Config::kThreads + threadIdx.x; i < Config::kTopK; i += Config::kCluster * Config::kThreads) {
    const int32_t token = s.nodes[i].token;
    if (token < 0) continue;
    const int first = find(s, token, bucket(s, token));
    if (first != i) r.locs_out[i] = ptx::load(r.locs_out + first);
  }
}

}  // namespace hisparse_plugin
