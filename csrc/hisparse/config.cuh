// Sizes fixed at compile time, and the shared memory they ask for.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace hisparse_plugin {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int ceil_log2(int n) { return n <= 1 ? 0 : 1 + ceil_log2((n + 1) / 2); }

// Shared memory of a block: 163 KB or more on sm_80, sm_90 and sm_100, 99 KB on their smaller relatives.
#if SGL_CUDA_ARCH == 860 || SGL_CUDA_ARCH == 890 || SGL_CUDA_ARCH >= 1200
constexpr int kMaxBucketBits = 13;
#else
constexpr int kMaxBucketBits = 14;
#endif

// kCluster blocks of kThreads threads serve one request; a lane keeps kInFlight loads of host memory outstanding.
template <int kTopK_, int kHot_, int kCluster_, int kThreads_, int kInFlight_>
struct SwapInConfig {
  static constexpr int kTopK = kTopK_, kHot = kHot_;
  static constexpr int kCluster = kCluster_, kThreads = kThreads_, kInFlight = kInFlight_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerProcessor = kThreads > 512 || kInFlight > 4 ? 1 : 2;  // share the registers

  // One bit per top-k entry, per buffer slot and per place in the LRU order, 32 to a word.
  static constexpr int kTopKWords = ceil_div(kTopK, 32);
  // A lane looks up kVector neighbouring slots: bit b of the word kVector * g + c is slot kVector * (32 g + b) + c.
  static constexpr int kVector = kHot >= kThreads * 4 * kCluster ? 4 : 1;
  static constexpr int kHotWords = ceil_div(kHot, 32 * kVector) * kVector;
  static constexpr int kGroupsPerBlock = ceil_div(kHotWords / kVector, kCluster);
  static constexpr int kGroupsPerWarp = ceil_div(kGroupsPerBlock, kWarps);
  static constexpr int kHotWordsPerBlock = kGroupsPerBlock * kVector;
  static constexpr int kTopKPerWarp = ceil_div(kTopKWords, kWarps);        // words
  static constexpr int kHotPerWarp = ceil_div(kHotWordsPerBlock, kWarps);  // words

  // Hash table of the selected tokens: a bucket holds an entry and what of its token the bucket's number does not say.
  // Eight times as many buckets as entries, as far as shared memory goes: a second look is rare.
  static constexpr int kIndexBits = ceil_log2(kTopKWords * 32);
  static constexpr int kBucketBits = std::max(std::min(kMaxBucketBits, kIndexBits + 3), kIndexBits);
  static constexpr int kBuckets = 1 << kBucketBits;
  static_assert(31 - kBucketBits + kIndexBits <= 31, "a token's upper bits, an entry and kMore share a word");

  static_assert(kTopK >= 1 && kTopK <= kHot, "a call may miss top_k tokens, and each needs a slot");
  static_assert(kHot <= 32768, "slots are stored as int16");
  static_assert(kThreads % 32 == 0 && kThreads >= 64 && kThreads <= 1024, "two warps count, at least");
  static_assert(kWarps >= kCluster, "a warp writes to one block of the cluster");
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4 || kCluster == 8 || kCluster == 16);
};

constexpr int32_t kNotFound = INT32_MIN;

// A bucket: upper bits of a token, and its entry. kMore: the bucket has more than one.
constexpr uint32_t kMore = 1u << 31, kEmpty = ~kMore;

// An entry of the top-k in the hash table.
struct alignas(8) Node {
  int32_t token;  // -1: nothing to look up
  int32_t next;   // index of another entry in the same bucket, -1: none
};

template <typename Config>
struct alignas(16) SharedMemory {
  alignas(16) uint32_t buckets[Config::kBuckets];                  // upper bits of a token and its entry, or kEmpty
  alignas(16) int16_t lru[ceil_div(Config::kHot, 8) * 8];          // the LRU order as it was
  Node nodes[Config::kTopKWords * 32];
  // A set bit is an entry that needs no row from the host. Before the exchange: those that need no looking up.
  uint32_t settled[Config::kTopKWords];
  uint32_t found_by[Config::kCluster][Config::kTopKWords];  // entries found by each block of the cluster
  uint32_t repeats[Config::kTopKWords];                     // entries that take their answer from another
  uint32_t hit_slots[Config::kHotWords];                    // slots whose token is selected
  uint32_t hits[Config::kHotWords];                         // the same in LRU order
  alignas(16) int32_t locs_out[Config::kTopKWords * 32];    // what this block found, or kNotFound
  uint64_t hits_mailbox, found_mailbox;  // open when all blocks have told their `hit_slots` and `found_by`
  int32_t repeated;                      // not 0: a token stands in the top-k twice
  int32_t not_looked_up;                 // entries that need no looking up
  int32_t no_slot;                       // entries of this block's words without a device row
  int32_t hits_in_order;                 // this block's part of a request whose buffer is in order
};

}  // namespace hisparse_plugin
