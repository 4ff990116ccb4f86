// The kernel's own source on CPU threads, for machines without a GPU: slow, and right or wrong as on the device, but for
// what depends on the order in which a GPU makes memory visible.
#include "hisparse/kernel.cuh"

using namespace hisparse_plugin;

template <int kTopK, int kHot, int kCluster, int kThreads>
void run(const SwapInParams& p, int batch) {
  using Config = SwapInConfig<kTopK, kHot, kCluster, kThreads, 4>;
  for (int row = 0; row < batch; ++row) {
    Cluster cluster(kCluster, kThreads);
    std::vector<std::thread> lanes;
    for (int b = 0; b < kCluster; ++b) {
      Block& block = *cluster.blocks[b];
      block.shared = static_cast<char*>(std::aligned_alloc(16, sizeof(SharedMemory<Config>)));
      std::memset(block.shared, 0xa5, sizeof(SharedMemory<Config>));
      for (int t = 0; t < kThreads; ++t) {
        lanes.emplace_back([&, b, t] {
          threadIdx.x = t, blockIdx.x = row * kCluster + b;
          this_cluster = &cluster, this_block = &block, this_warp = &block.warps[t / 32];
          swap_in_kernel<Config>(p);
        });
      }
    }
    for (auto& lane : lanes) lane.join();
    for (auto& block : cluster.blocks) std::free(block->shared);
  }
}

extern "C" bool swap_in(SwapInParams* p, int batch, int top_k, int hot, int cluster, int threads) {
  p->row = row_shape(p->host_rows, p->host_row_stride, p->device_rows, p->device_row_stride, p->row_bytes);
#define CASE(k, h, c, t) \
  if (top_k == k && hot == h && cluster == c && threads == t) return run<k, h, c, t>(*p, batch), true;
  CASES
  return false;
}
