// Sizes fixed at compile time, and the shared memory they ask for.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace hisparse_plugin {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int ceil_log2(int n) { return n <= 1 ? 0 : 1 + ceil_log2((n + 1) / 2); }

// Shared memory that a block may ask for: 227 KB on sm_90 and sm_100, 163 on sm_80, 99 on their smaller relatives.
#if SGL_CUDA_ARCH == 860 || SGL_CUDA_ARCH == 890 || SGL_CUDA_ARCH >= 1200
constexpr int kSharedBytes = 99 << 10, kMaxBucketBits = 13;
#elif SGL_CUDA_ARCH < 900
constexpr int kSharedBytes = 163 << 10, kMaxBucketBits = 14;
#else
constexpr int kSharedBytes = 227 << 10, kMaxBucketBits = 15;
#endif

// kCluster blocks of kThreads threads serve one request; a lane keeps kInFlight loads of host memory outstanding.
template <int kTopK_, int kHot_, int kCluster_, int kThreads_, int kInFlight_>
struct SwapInConfig {
  static constexpr int kTopK = kTopK_, kHot = kHot_;
  static constexpr int kCluster = kCluster_, kThreads = kThreads_, kInFlight = kInFlight_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerProcessor = kCluster == 1 || kThreads > 512 || kInFlight > 4 ? 1 : 2;  // share registers

  // One bit per top-k entry and per place in the LRU order, 32 to a word.
  static constexpr int kTopKWords = ceil_div(kTopK, 32), kEntries = kTopKWords * 32;
  static constexpr int kHotWords = ceil_div(kHot, 32);
  static constexpr int kTopKPerWarp = ceil_div(kTopKWords, kWarps);        // words
  static constexpr int kHotPerWarp = ceil_div(kHotWords, kCluster * kWarps);  // words
  static constexpr bool kHotIsEven = kHot == kCluster * kWarps * kHotPerWarp * 32;  // every lane has as many places

  // A block of a large cluster has few hits: it reads their device rows and writes the answers one by one. Others list
  // the slots by entry first.
  static constexpr bool kListed = kCluster <= 4;

  // Hash table of the selected tokens: a bucket holds an entry and what of its token the bucket's number does not say.
  // Sixteen times as many buckets as entries, as far as shared memory goes: a second look is rare.
  static constexpr int kIndexBits = ceil_log2(kEntries);
  static constexpr int shared_with(int bucket_bits) {
    return (4 << bucket_bits) + kHotWords * 68 + kEntries * (kListed ? 10 : 8) + (kCluster + 4) * kTopKWords * 4 + 256;
  }
  // More than eightfold only beside the buffer's tables, see below. Where a block looks up many places and a table of
  // fourfold is large, more than that.
  static constexpr int kAlways = kListed && kIndexBits >= 12 ? 2 : 3;
  static constexpr int fitting(int bits) {
    const int beside = bits > kIndexBits + kAlways ? kHot * 8 : 0;
    return bits > kIndexBits && shared_with(bits) + beside > kSharedBytes ? fitting(bits - 1) : bits;
  }
  static constexpr int kBucketBits = std::max(fitting(std::min(kMaxBucketBits, kIndexBits + 4)), kIndexBits);
  static constexpr int kBuckets = 1 << kBucketBits;

  // A bucket's value: the token's upper bits, where they stand in the token; below them an entry, times two where there is
  // room, as `slots` is addressed by. If a bit is left between, it tells an empty bucket from one of a negative token.
  static constexpr uint32_t kUpper = (1u << 31) - (1u << kBucketBits);
  static constexpr int kEntryShift = kBucketBits > kIndexBits, kEntryBits = kIndexBits + kEntryShift;
  static constexpr bool kBitLeft = kBucketBits > kEntryBits;

  // The buffer's tables are copied to shared memory as far as there is room beside the rest, to be read in LRU order.
  static constexpr int kRest = shared_with(kBucketBits);
  static constexpr bool kTokensInShared = kRest + kHot * 4 <= kSharedBytes;
  static constexpr bool kLocsInShared = kListed && kRest + kHot * 8 <= kSharedBytes;

  static_assert(kTopK >= 1 && kTopK <= kHot, "a call may miss top_k tokens, and each needs a slot");
  static_assert(kHot <= 32768, "slots are stored as int16");
  static_assert(kThreads % 32 == 0 && kThreads >= 64 && kThreads <= 1024);
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4 || kCluster == 8 || kCluster == 16);
};

constexpr uint16_t kNoSlot = UINT16_MAX;

// A bucket: upper bits of a token, and its entry. kMore: the bucket has more than one.
constexpr uint32_t kMore = 1u << 31, kEmpty = ~kMore;

template <typename Config>
struct alignas(16) SharedMemory {
  alignas(16) uint32_t buckets[Config::kBuckets];                          // the entry that came last, or kEmpty
  alignas(16) uint32_t next[Config::kEntries];                             // by entry: what its bucket held, or kEmpty
  alignas(16) int32_t selected[Config::kEntries];                          // the top-k
  alignas(16) uint16_t lru[Config::kHotWords * 32];                        // the LRU order as it was
  alignas(16) int32_t tokens[Config::kTokensInShared ? Config::kHot : 4];  // by slot, as they were
  alignas(16) int32_t locs[Config::kLocsInShared ? Config::kHot : 4];      // by slot
  alignas(16) uint16_t slots[Config::kListed ? Config::kEntries : 8];      // by entry: where it was found, or kNoSlot
  // A set bit is an entry that needs no row from the host. Before the exchange: those that need no looking up.
  uint32_t settled[Config::kTopKWords];
  uint32_t found[Config::kTopKWords];                       // entries found by this block, unless kListed
  uint32_t found_by[Config::kCluster][Config::kTopKWords];  // and by each block of the cluster
  uint32_t repeats[Config::kTopKWords];                     // entries that take their answer from another
  alignas(16) uint32_t hits[Config::kHotWords];             // places in LRU order whose token is selected
  uint64_t hits_mailbox, found_mailbox;  // open when all blocks have told their `hits` and `found_by`
  int32_t repeated;                      // not 0: a token stands in the top-k twice
  int32_t not_looked_up;                 // entries that need no looking up
  int32_t no_slot;                       // entries of this block's words without a slot
  alignas(16) int32_t request[4];        // num_real_reqs, req_pool_indices, seq_lens, tail_start
  alignas(16) int32_t expected[4];       // the same before the predecessor's end
  int32_t hits_in_order;                 // this block's part of a request whose buffer is in order
};

}  // namespace hisparse_plugin
