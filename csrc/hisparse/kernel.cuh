// The two kernels. swap_in: one thread-block cluster plans and copies for one request. copy_planned: the copies alone.
#pragma once

#include <cstdint>

#include "phases.cuh"

namespace hisparse_plugin {

// Every block of the cluster has come this far and sees what the others wrote.
template <typename Config>
__device__ __forceinline__ void cluster_sync() {
  if constexpr (Config::kCluster == 1) {
    __syncthreads();
  } else {
    ptx::cluster_arrive_release();
    ptx::cluster_wait();
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerProcessor)
    swap_in_kernel(const __grid_constant__ SwapInParams p) {
  extern __shared__ __align__(16) char shared_memory[];
  auto& s = *reinterpret_cast<SharedMemory<Config>*>(shared_memory);
  const int row = blockIdx.x / Config::kCluster, rank = blockIdx.x % Config::kCluster;

  clear(s, rank);
  if constexpr (Config::kCluster > 1) ptx::cluster_arrive_relaxed();
  __syncthreads();  // the table is empty
  ptx::wait_for_predecessor();
  ptx::let_successor_start();

  const int32_t* top_k = p.top_k_tokens + row * p.top_k_stride;
  Selection<Config> selection;
  selection.load(top_k, 0);
  const Request r = load_request(p, row);
  if constexpr (Config::kCluster > 1) ptx::cluster_wait();  // all blocks run: their shared memory may be written
  if (!r.real || r.seq_len <= Config::kHot) return answer_from_positions(s, p, r, top_k, rank);

  Residents<Config> residents;
  residents.load(r, rank, 0);
  load_lru(s, r.lru);
  selection.insert(s, r, rank, 0);
  for (int first = selection.kAtOnce; first < Config::kTopKPerWarp; first += selection.kAtOnce) {
    selection.load(top_k, first);
    selection.insert(s, r, rank, first);
  }
  __syncthreads();  // the table is complete
  residents.look_up(s, r, rank);
  ptx::copy_async_wait();
  __syncthreads();  // this block's answers and its copy of the LRU order are there
  answer_found(s, r, rank);
  if constexpr (Config::kCluster > 1) ptx::mailbox_wait(&s.hits_mailbox);
  order_hits(s);
  __syncthreads();  // all bits are there
  Totals totals = total(s, rank);
  if constexpr (Config::kCluster > 1) ptx::mailbox_wait(&s.found_mailbox);  // nobody reads the tables any more
  if (p.counters && in_last_warp<Config>()) count_hits(p, (rank == 0 ? Config::kTopK : 0) - s.no_slot, rank == 0);
  bool repeated = false;
  if (totals.misses != 0) {  // or a token stands in the top-k twice, and only once in the buffer
    look_for_repeats(s);
    merge_found(s);
    __syncthreads();  // all entries are settled that need no row
    repeated = s.repeated != 0;
    if (repeated) {
      settle_repeated(s);
      __syncthreads();
      totals.misses = count_unsettled(s);
    }
  }
  if (rank == 0 && p.miss_count && threadIdx.x == 0) p.miss_count[row] = totals.misses;
  if (totals.misses == 0) {
    write_lru(s, r.lru, rank, totals);
  } else {
    const Work<Config> work(s, totals.misses, rank);
    auto misses = work.place(s, p, r, 0);
    if (rank == 0 && p.counters && in_last_warp<Config>()) count_misses(p, totals.misses);
    write_lru(s, r.lru, rank, totals);  // while the addresses of the rows are on their way
    for (int round = 0;; ++round) {
      work.record(misses, p, r, row, round);
      if (!p.skip_io) work.copy(misses, p, round);
      if (!work.has(round + 1)) break;
      misses = work.place(s, p, r, round + 1);
    }
  }
  if (repeated) {
    cluster_sync<Config>();  // all are answered that others take their answer from
    answer_repeated(s, r, rank);
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
