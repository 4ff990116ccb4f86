// The kernel's own source on CPU threads, for machines without a GPU: slow, and right or wrong as on the device, but for
// what depends on the order in which a GPU makes memory visible.
#include "hisparse/kernel.cuh"

#include <deque>

using namespace hisparse_plugin;

static int late = -1;  // the block of a cluster that is
extern "C" void let_be_late(int rank) { late = rank; }

// Calls one after the other, as programmatic dependents that all start at once and wait where the kernel says so. The
// rows of a batch are of different requests: one row after the other is as good.
template <int kTopK, int kHot, int kCluster, int kThreads>
void run(const SwapInParams* p, int calls, int batch) {
  using Config = SwapInConfig<kTopK, kHot, kCluster, kThreads, 4>;
  for (int row = 0; row < batch; ++row) {
    std::deque<Cluster> clusters;
    std::deque<std::latch> ended;
    std::vector<std::thread> lanes;
    for (int call = 0; call < calls; ++call) {
      Cluster& cluster = clusters.emplace_back(kCluster, kThreads);
      if (late >= 0 && late < kCluster) cluster.late = cluster.blocks[late].get();
      if (call > 0) cluster.predecessor = &ended.back();
      std::latch& end = ended.emplace_back(kCluster * kThreads);
      for (int b = 0; b < kCluster; ++b) {
        Block& block = *cluster.blocks[b];
        block.shared = static_cast<char*>(std::aligned_alloc(16, sizeof(SharedMemory<Config>)));
        std::memset(block.shared, 0xa5, sizeof(SharedMemory<Config>));
        for (int t = 0; t < kThreads; ++t) {
          lanes.emplace_back([&, call, b, t] {
            threadIdx.x = t, blockIdx.x = row * kCluster + b;
            this_cluster = &cluster, this_block = &block, this_warp = &block.warps[t / 32];
            swap_in_kernel<Config>(p[call]);
            end.count_down();
          });
        }
      }
    }
    for (auto& lane : lanes) lane.join();
    for (auto& cluster : clusters) {
      for (auto& block : cluster.blocks) std::free(block->shared);
    }
  }
}

// Which of the kernel's branches an instance takes, a bit for each.
template <int kTopK, int kHot, int kCluster, int kThreads>
constexpr int branches_of() {
  using Config = SwapInConfig<kTopK, kHot, kCluster, kThreads, 4>;
  constexpr int kPerLane = std::max(Config::kHotWords / 32, 1);
  const bool neighbours = Config::kHotWords % 64 == 0 && Config::kHotPerWarp % kPerLane == 0;  // as in `total`
  return (Residents<Config>::kRounds > 1) | Residents<Config>::kEven << 1 | neighbours << 2 | !Config::kBitLeft << 3 |
         !Config::kEntryShift << 4 | (Config::kHotWords % 64 == 0) << 5;
}
extern "C" int branches(int top_k, int hot, int cluster, int threads) {
#define CASE(k, h, c, t) \
  if (top_k == k && hot == h && cluster == c && threads == t) return branches_of<k, h, c, t>();
  CASES
#undef CASE
  return -1;
}

extern "C" bool swap_in(SwapInParams* p, int calls, int batch, int top_k, int hot, int cluster, int threads) {
  for (int i = 0; i < calls; ++i) {
    p[i].row = row_shape(p[i].host_rows, p[i].host_row_stride, p[i].device_rows, p[i].device_row_stride, p[i].row_bytes);
  }
#define CASE(k, h, c, t) \
  if (top_k == k && hot == h && cluster == c && threads == t) return run<k, h, c, t>(p, calls, batch), true;
  CASES
  return false;
}
