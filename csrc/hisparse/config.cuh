// Sizes fixed at compile time, and the shared memory they ask for.
#pragma once

#include <climits>
#include <cstdint>

namespace hisparse_plugin {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int ceil_log2(int n) { return n <= 1 ? 0 : 1 + ceil_log2((n + 1) / 2); }

// kCluster blocks of kThreads threads serve one request; a lane keeps kInFlight loads of host memory outstanding.
template <int kTopK_, int kHot_, int kCluster_, int kThreads_, int kInFlight_>
struct SwapInConfig {
  static constexpr int kTopK = kTopK_, kHot = kHot_;
  static constexpr int kCluster = kCluster_, kThreads = kThreads_, kInFlight = kInFlight_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlocksPerProcessor = kThreads > 512 || kInFlight > 4 ? 1 : 2;  // share the registers

  // One bit per top-k entry, per buffer slot and per place in the LRU order, 32 to a word.
  static constexpr int kTopKWords = ceil_div(kTopK, 32);
  static constexpr int kHotWords = ceil_div(kHot, 32);
  static constexpr int kHotWordsPerBlock = ceil_div(kHotWords, kCluster);
  static constexpr int kTopKPerWarp = ceil_div(kTopKWords, kWarps);         // words
  static constexpr int kHotPerWarp = ceil_div(kHotWordsPerBlock, kWarps);  // words

  // Hash table of the selected tokens, with chains. Half as many entries as buckets keep chains short.
  static constexpr int kBucketBits = ceil_log2(kTopK) + 1;
  static constexpr int kBuckets = 1 << kBucketBits;

  static_assert(kTopK >= 1 && kTopK <= kHot, "a call may miss top_k tokens, and each needs a slot");
  static_assert(kHot <= 32768, "slots are stored as int16");
  static_assert(kThreads % 32 == 0 && kThreads >= 64 && kThreads <= 1024, "two warps count, at least");
  static_assert(kWarps >= kCluster, "a warp writes to one block of the cluster");
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4 || kCluster == 8 || kCluster == 16);
};

constexpr int32_t kNotFound = INT32_MIN;

// An entry of the top-k in the hash table.
struct alignas(8) Node {
  int32_t token;  // -1: nothing to look up
  int32_t next;   // index of another entry in the same bucket, -1: none
};

template <typename Config>
struct alignas(16) SharedMemory {
  int32_t buckets[Config::kBuckets];                               // index of an entry, -1: none
  alignas(16) int16_t lru[ceil_div(Config::kHot, 8) * 8];          // the LRU order as it was
  Node nodes[Config::kTopKWords * 32];
  // A set bit is an entry that needs no row from the host. Before the exchange: what this block knows by itself.
  uint32_t settled[Config::kTopKWords];
  uint32_t found_by[Config::kCluster][Config::kTopKWords];  // entries found by each block of the cluster
  uint32_t hit_slots[Config::kHotWords];                    // slots whose token is selected
  uint32_t hits[Config::kHotWords];                         // the same in LRU order
  int32_t misses_before[Config::kTopKWords + 1];
  int32_t hits_before[Config::kHotWords + 1];
  int32_t locs_out[Config::kCluster == 1 ? Config::kTopKWords * 32 : 1];  // what a block alone found, or kNotFound
  uint32_t repeated_by[Config::kCluster];  // not 0: that block saw a token stand in the top-k twice
  uint64_t mailbox;  // opens when all blocks have told what they found
  int32_t no_slot;                         // entries of this block's words without a device row
};

}  // namespace hisparse_plugin
