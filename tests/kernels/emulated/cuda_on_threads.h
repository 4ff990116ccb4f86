// What the kernel needs of CUDA, on CPU threads: one thread per lane, std::barrier for warps, blocks and clusters.
// Included before the sources, whose `ptx.cuh` is replaced by the one beside this file.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::max, std::min;
struct int4 {
  int x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct Warp {
  std::barrier<> barrier{32};
  uint64_t said[32];
};
struct Block {
  explicit Block(int threads) : barrier(threads), warps(threads / 32) {}
  std::barrier<> barrier;
  std::vector<Warp> warps;
  char* shared = nullptr;
};
struct Cluster {
  Cluster(int size, int threads) : barrier(size * threads) {
    for (int b = 0; b < size; ++b) blocks.push_back(std::make_unique<Block>(threads));
  }
  std::barrier<> barrier;
  std::vector<std::unique_ptr<Block>> blocks;
  std::latch* predecessor = nullptr;  // open when the call before has ended
  const Block* late = nullptr;        // slower than the others when it has arrived at the cluster's barrier, if any
};

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx;
inline thread_local Cluster* this_cluster;
inline thread_local Block* this_block;
inline thread_local Warp* this_warp;

inline void __syncthreads() { this_block->barrier.arrive_and_wait(); }

// Every lane says a value, then works out its answer from what all said.
template <typename T, typename F>
auto together(T value, F answer) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(&this_warp->said[threadIdx.x % 32], &value, sizeof(T));
  this_warp->barrier.arrive_and_wait();
  const auto said = [](int lane) {
    T v;
    std::memcpy(&v, &this_warp->said[lane], sizeof(T));
    return v;
  };
  const auto result = answer(said);
  this_warp->barrier.arrive_and_wait();
  return result;
}
inline uint32_t __ballot_sync(uint32_t, bool mine) {
  return together(mine, [](auto said) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t{said(lane)} << lane;
    return bits;
  });
}
template <typename T>
T __shfl_sync(uint32_t, T mine, int lane) {
  return together(mine, [&](auto said) { return said(lane % 32); });
}
template <typename T>
T __shfl_up_sync(uint32_t, T mine, int by) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(~0u, mine, lane < by ? lane : lane - by);
}
template <typename T>
T __reduce_add_sync(uint32_t, T mine) {
  return together(mine, [](auto said) {
    T sum{};
    for (int lane = 0; lane < 32; ++lane) sum += said(lane);
    return sum;
  });
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
