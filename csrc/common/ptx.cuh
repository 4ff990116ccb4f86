// All inline assembly. Callers read as prose; what an instruction needs (architecture, state space) is said here once.
#pragma once

#include <cstdint>

namespace hisparse_plugin::ptx {

// ---- loads and stores -------------------------------------------------------------------------------------------
// The tables change between launches, and a launch may begin while its predecessor still runs: read them from L2,
// past an L1 that may hold a line from before the change.
__device__ __forceinline__ int32_t load(const int32_t* p) {
  int32_t v;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int4 load(const int4* p) {
  int4 v;
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ int64_t load(const int64_t* p) {
  int64_t v;
  asm volatile("ld.global.cg.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ int16_t load(const int16_t* p) {
  int16_t v;
  asm volatile("ld.global.cg.b16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store(int32_t* p, int32_t v) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store(int16_t* p, int16_t v) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
// (a & mask) ^ b, as one instruction wherever it stands.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_xor(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(v) : "r"(a), "n"(kMask), "r"(b));
  return v;
}
// `p` as one address from here on, which the compiler would otherwise put together anew at each use.
template <typename T>
__device__ __forceinline__ T* in_register(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// One unit of a row, read once from host memory: no cache keeps it. The predicate is part of the instruction, and `v`
// its destination. Behind a branch the compiler copies the result, and so the next load waits for this one, 2 us.
__device__ __forceinline__ void load_row_if(bool valid, uint4& v, const uint4* p) {
  asm volatile(
      "{.reg .pred valid; setp.ne.b32 valid, %5, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(int(valid)));
}
__device__ __forceinline__ void load_row_if(bool valid, uint64_t& v, const uint64_t* p) {
  asm volatile(
      "{.reg .pred valid; setp.ne.b32 valid, %2, 0;\n@valid ld.global.nc.L1::no_allocate.b64 %0, [%1];}"
      : "+l"(v)
      : "l"(p), "r"(int(valid)));
}
__device__ __forceinline__ void load_row_if(bool valid, uint32_t& v, const uint32_t* p) {
  asm volatile(
      "{.reg .pred valid; setp.ne.b32 valid, %2, 0;\n@valid ld.global.nc.L1::no_allocate.b32 %0, [%1];}"
      : "+r"(v)
      : "l"(p), "r"(int(valid)));
}
__device__ __forceinline__ void load_row_if(bool valid, uint16_t& v, const uint16_t* p) {
  asm volatile(
      "{.reg .pred valid; setp.ne.b32 valid, %2, 0;\n@valid ld.global.nc.L1::no_allocate.b16 %0, [%1];}"
      : "+h"(v)
      : "l"(p), "r"(int(valid)));
}
__device__ __forceinline__ void load_row_if(bool valid, uint8_t& v, const uint8_t* p) {
  uint32_t wide = v;
  asm volatile(
      "{.reg .pred valid; setp.ne.b32 valid, %2, 0;\n@valid ld.global.nc.L1::no_allocate.u8 %0, [%1];}"
      : "+r"(wide)
      : "l"(p), "r"(int(valid)));
  v = static_cast<uint8_t>(wide);
}
// And its store, marked to leave L2 first, as the lines are that came from host memory. Up to 10% faster where the rows of
// the last calls do not fit in L2 (docs/swap_in.md).
template <typename Unit>
__device__ __forceinline__ void store_row(Unit* p, Unit v) {
  __stcs(p, v);
}

// ---- asynchronous global -> shared copies (sm_80) ---------------------------------------------------------------
// Both addresses on 16 bytes.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
// Copies up to here may be waited for apart from later ones.
__device__ __forceinline__ void copy_async_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// This thread's copies have landed but those since the last `copy_async_group`.
__device__ __forceinline__ void copy_async_wait_but_last() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 1;" ::: "memory");
}
// This thread's copies have landed; a block barrier then makes them visible to the others.
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- programmatic dependent launch (sm_90) ----------------------------------------------------------------------
// Everything earlier kernels of the stream wrote is visible after this. A no-op without the launch attribute.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel of the stream may take its place on the chip; it still waits for our end before it reads.
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- thread-block clusters (sm_90) ------------------------------------------------------------------------------
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ uint32_t remote_address(const void* shared, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
  return remote;
}
// A barrier for words that other blocks of the cluster send. One thread; the others of the block see it after a block
// barrier, those of the cluster after a cluster barrier.
__device__ __forceinline__ void mailbox_init(uint64_t* mailbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mailbox)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// It opens once `bytes` have come, some of them perhaps before this. One thread.
__device__ __forceinline__ void mailbox_expect(uint64_t* mailbox, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(mailbox)), "r"(bytes)
               : "memory");
}
// Store to the same variable in the shared memory of block `rank` and count it in that block's mailbox.
__device__ __forceinline__ void mail(uint32_t* shared, uint32_t value, uint64_t* mailbox, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   remote_address(shared, rank)),
               "r"(value), "r"(remote_address(mailbox, rank))
               : "memory");
}
__device__ __forceinline__ void mail(uint32_t* shared, uint4 value, uint64_t* mailbox, uint32_t rank) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                   remote_address(shared, rank)),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(remote_address(mailbox, rank))
               : "memory");
}
// What is mailed lies in this block's shared memory, which no cache holds: the block's scope will do. To acquire it for
// the cluster is to drop the lines of L1, and to wait for all loads under way first.
__device__ __forceinline__ void mailbox_wait(uint64_t* mailbox) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(mailbox))
      : "memory");
}
#else
__device__ __forceinline__ void cluster_arrive_release() {}
__device__ __forceinline__ void cluster_arrive_relaxed() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ void mailbox_init(uint64_t*) {}
__device__ __forceinline__ void mailbox_expect(uint64_t*, uint32_t) {}
__device__ __forceinline__ void mail(uint32_t*, uint32_t, uint64_t*, uint32_t) {}
__device__ __forceinline__ void mail(uint32_t*, uint4, uint64_t*, uint32_t) {}
__device__ __forceinline__ void mailbox_wait(uint64_t*) {}
#endif

}  // namespace hisparse_plugin::ptx
