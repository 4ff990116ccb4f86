// Sizes fixed at compile time, and the shared memory they ask for.
#pragma once

#include <cstdint>

namespace hisparse_plugin {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int ceil_log2(int n) { return n <= 1 ? 0 : 1 + ceil_log2((n + 1) / 2); }

// kCluster blocks of kThreads threads serve one request.
template <int kTopK_, int kHot_, int kCluster_, int kThreads_>
struct SwapInConfig {
  static constexpr int kTopK = kTopK_, kHot = kHot_, kCluster = kCluster_, kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kInFlight = kThreads > 512 ? 4 : 8;  // 16-byte loads per lane, as many as the registers hold

  // One bit per top-k entry and one per buffer slot in LRU order, 32 to a word; a word belongs to one warp of one block.
  static constexpr int kTopKWords = ceil_div(kTopK, 32);
  static constexpr int kHotWords = ceil_div(kHot, 32);
  static constexpr int kHotWordsPerBlock = ceil_div(kHotWords, kCluster);
  static constexpr int kHotGroups = ceil_div(kHotWordsPerBlock, kWarps);  // words a warp looks up

  // Hash table of the selected tokens: open addressing, at most half full. An entry is a token's low kTagBits and its
  // index in the top-k; bit 31 is set in kEmpty only.
  static constexpr int kIndexBits = ceil_log2(kTopK);
  static constexpr int kTagBits = kIndexBits == 0 ? 30 : 31 - kIndexBits;
  static constexpr int kTableBits = kIndexBits < 2 ? 3 : kIndexBits + 1;
  static constexpr int kTableSize = 1 << kTableBits;
  static constexpr uint32_t kEmpty = ~0u;

  static_assert(kTopK >= 1 && kTopK <= kHot, "a call may miss top_k tokens, and each needs a slot");
  static_assert(kHot <= 32768, "slots are stored as int16");
  static_assert(kThreads % 32 == 0 && kThreads >= 64 && kThreads <= 1024, "two warps count, at least");
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4 || kCluster == 8 || kCluster == 16);
};

template <typename Config>
struct alignas(16) SharedMemory {
  uint32_t table[Config::kTableSize];
  int16_t lru[ceil_div(Config::kHot, 8) * 8];
  int32_t tokens[Config::kTopKWords * 32];  // the top-k; -1 where there is nothing to look up
  // A set bit is an entry that needs no row from the host. Before the exchange: what this block knows by itself.
  uint32_t settled[Config::kTopKWords];
  uint32_t found_by[Config::kCluster][Config::kTopKWords];  // entries found by each block of the cluster
  uint32_t hits[Config::kHotWords];                         // LRU positions whose token is selected
  int32_t misses_before[Config::kTopKWords + 1];
  int32_t hits_before[Config::kHotWords + 1];
  int32_t no_slot;   // entries without a device row
  int32_t repeated;  // some token stands in the top-k twice
};

}  // namespace hisparse_plugin
