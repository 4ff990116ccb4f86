// swap_in: one thread-block cluster plans and copies for one request.
#pragma once

#include <cstdint>

#include "misses.cuh"

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
__device__ __forceinline__ void clear(SharedMemory<Config>& s) {
  const auto fill = [](auto* words, auto count, int32_t value) {
    static_assert(count() % 4 == 0);
    for_each<count() / 4, Config::kThreads>(
        [&](int i) { reinterpret_cast<int4*>(words)[i] = make_int4(value, value, value, value); });
  };
  fill(s.buckets, std::integral_constant<int, Config::kBuckets>{}, kEmpty);
  fill(s.next, std::integral_constant<int, Config::kEntries>{}, kEmpty);
  if constexpr (Config::kListed) fill(s.slots, std::integral_constant<int, Config::kEntries / 2>{}, -1);
  for_each<Config::kTopKWords, Config::kThreads>([&](int w) { s.settled[w] = s.found[w] = 0; });
  if (threadIdx.x == 0) s.not_looked_up = s.no_slot = s.repeated = s.hits_in_order = 0;
}

// What the other blocks of the cluster, and this one, will mail. One thread.
template <typename Config>
__device__ __forceinline__ void expect_mail(SharedMemory<Config>& s, int rank) {
  ptx::mailbox_expect(&s.hits_mailbox, (Config::kHotWords - own_words<Config>(rank)) * 4);
  ptx::mailbox_expect(&s.found_mailbox, Config::kCluster * Config::kTopKWords * 4);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerProcessor)
    swap_in_kernel(const __grid_constant__ SwapInParams p) {
  extern __shared__ __align__(16) char shared_memory[];
  auto& s = *reinterpret_cast<SharedMemory<Config>*>(shared_memory);
  const int row = blockIdx.x / Config::kCluster, rank = blockIdx.x % Config::kCluster;

  const int32_t* word = ptx::in_register(request_word(p, row));
  const int32_t foretold = word ? ptx::load(word) : 0;  // under way while the table is cleared
  if constexpr (Config::kCluster > 1) {
    if (threadIdx.x == 0) {
      ptx::mailbox_init(&s.hits_mailbox);
      ptx::mailbox_init(&s.found_mailbox);
    }
    ptx::cluster_arrive_relaxed();
  }
  clear(s);
  if (threadIdx.x < 4) s.expected[threadIdx.x] = foretold;
  __syncthreads();  // the table is empty
  if constexpr (Config::kCluster > 1) {
    if (threadIdx.x == 0) expect_mail(s, rank);
    ptx::cluster_wait();  // all blocks run: their shared memory may be written
  }
  // The predecessor may write what a request is told by, but mostly that was written long ago: where it is as expected,
  // its tables come together with it, and not after it.
  const Request expected = load_request(p, row, s.expected);
  const bool staged = expected.real && expected.seq_len > Config::kHot &&
                      static_cast<uint32_t>(s.expected[1]) < static_cast<uint32_t>(p.requests);
  ptx::wait_for_predecessor();
  ptx::let_successor_start();

  const int32_t* top_k = p.top_k_tokens + row * p.top_k_stride;
  const int32_t told = word ? ptx::load(word) : 0;
  Selection<Config> selection;
  selection.load(top_k, 0);
  if (staged) stage_tables(s, expected);
  if (threadIdx.x < 4) s.request[threadIdx.x] = told;
  __syncthreads();
  const Request r = load_request(p, row, s.request);
  if (!r.real || r.seq_len <= Config::kHot) {
    ptx::copy_async_wait();
    return answer_from_positions(s, p, r, top_k, rank);
  }
  if (__builtin_expect(!staged || s.request[1] != s.expected[1], 0)) {
    ptx::copy_async_wait();
    __syncthreads();
    stage_tables(s, r);
  }
  selection.insert(s, r, rank, 0);
#pragma unroll 1
  for (int round = 1; round < selection.kRounds; ++round) {
    selection.load(top_k, round);
    selection.insert(s, r, rank, round);
  }
  stage_locs(s, r);
  if constexpr (Config::kLocsInShared) {
    ptx::copy_async_wait_but_last();
  } else {
    ptx::copy_async_wait();
  }
  __syncthreads();  // the table is complete, and the buffer's tables are there

  Residents<Config> residents;
  residents.look_up(s, r, rank, 0);
#pragma unroll 1
  for (int round = 1; round < residents.kRounds; ++round) {
    if constexpr (!Config::kListed) residents.answer(r);
    residents.look_up(s, r, rank, round);
  }
  if constexpr (Config::kLocsInShared) ptx::copy_async_wait();
  __syncthreads();  // what this block found, and the rows of its slots
  Found<Config> found;
  if constexpr (Config::kListed) {
    found.load(s, r, rank, 0);
#pragma unroll 1
    for (int round = 1; round < found.kRounds; ++round) {
      found.answer(r, round - 1);
      found.load(s, r, rank, round);
    }
  } else if constexpr (Config::kCluster > 1) {
    mail_found(s, rank);
  }
  if constexpr (Config::kCluster > 1) ptx::mailbox_wait(&s.hits_mailbox);  // all bits are there; nobody reads tables
  Totals totals = total(s, rank);
  if (p.counters && in_last_warp<Config>()) count_hits(p, (rank == 0 ? Config::kTopK : 0) - s.no_slot, rank == 0);
  if constexpr (Config::kListed) {
    found.answer(r, found.kRounds - 1);
  } else {
    residents.answer(r);
  }
  if (__builtin_expect(totals.misses == 0, 1)) {
    write_lru_of_hits(s, residents, r.lru, rank, totals);
    if (rank == 0 && p.miss_count && threadIdx.x == 0) p.miss_count[row] = 0;
    if constexpr (Config::kCluster > 1) ptx::mailbox_wait(&s.found_mailbox);  // nobody writes here any more
    return;
  }

  // Something misses, or a token stands in the top-k twice, and only once in the buffer.
  look_for_repeats(s);
  if constexpr (Config::kCluster > 1) ptx::mailbox_wait(&s.found_mailbox);
  merge_found(s);
  __syncthreads();  // all entries are settled that need no row
  const bool repeated = s.repeated != 0;
  if (repeated) {
    settle_repeated(s);
    __syncthreads();
    totals.misses = count_unsettled(s);
  }
  if (rank == 0 && p.miss_count && threadIdx.x == 0) p.miss_count[row] = totals.misses;
  const Work<Config> work(s, totals.misses, rank);
  auto misses = work.place(s, p, r, 0);
  if (rank == 0 && p.counters && in_last_warp<Config>()) count_misses(p, totals.misses);
  write_lru(s, r.lru, rank, totals);  // while the addresses of the rows are on their way
  for (int round = 0; work.has(round); ++round) {
    if (round != 0) misses = work.place(s, p, r, round);
    work.record(misses, p, r, row, round);
    if (!p.skip_io) work.copy(misses, p, round);
  }
  if (repeated) {
    cluster_sync<Config>();  // all are answered that others take their answer from
    answer_repeated(s, r, rank);
  }
}

}  // namespace hisparse_plugin
