// copy_planned: the copies of a recorded plan, alone.
#pragma once

#include <cstdint>

#include "../common/copy.cuh"
#include "config.cuh"
#include "params.h"

namespace hisparse_plugin {

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

// `grid` blocks share all rows of all requests.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) copy_planned_kernel(const __grid_constant__ CopyPlannedParams p) {
  constexpr int kMaxBatch = 1024;
  __shared__ int32_t before[kMaxBatch + 1];  // misses of earlier requests
  ptx::wait_for_predecessor();
  ptx::let_successor_start();
  const int real = p.num_real_reqs ? min(p.batch, ptx::load(p.num_real_reqs)) : p.batch;
  const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) * gridDim.x + blockIdx.x;
  const int warps = gridDim.x * (kThreads / 32);
  for (int start = 0; start < real; start += kMaxBatch) {
    const int batch = min(real - start, kMaxBatch);
    if (threadIdx.x < 32) {
      prefix_sum<kMaxBatch>(before, [&](int i) { return i < batch ? ptx::load(p.miss_count + start + i) : 0; });
    }
    __syncthreads();
    const int total = before[kMaxBatch];
    for (int first = warp; first < total; first += warps * 32) {
      const int m = first + lane * warps;
      const char* src = nullptr;
      char* dst = nullptr;
      if (m < total) {
        int i = 0;
        for (int step = kMaxBatch / 2; step > 0; step /= 2) {
          if (before[i + step] <= m) i += step;
        }
        const int64_t at = start + i;
        src = p.host_rows + ptx::load(p.miss_src + at * p.src_stride + (m - before[i])) * p.host_row_stride;
        dst = p.device_rows + ptx::load(p.miss_dst + at * p.dst_stride + (m - before[i])) * p.device_row_stride;
      }
      copy_rows<4>(src, dst, min(32, ceil_div(total - first, warps)), p.row);
    }
    __syncthreads();
  }
}

}  // namespace hisparse_plugin
