// Stands in for csrc/common/ptx.cuh on CPU threads. Asynchronous copies are done at once; a mailbox holds the bytes that
// are still to come.
#pragma once

#include "cuda_on_threads.h"

namespace hisparse_plugin::ptx {

template <typename T>
T load(const T* p) {
  return *p;
}
template <typename T>
void store(T* p, T v) {
  *p = v;
}
template <uint32_t kMask>
uint32_t masked_xor(uint32_t a, uint32_t b) {
  return (a & kMask) ^ b;
}
template <typename T>
T* in_register(T* p) {
  return p;
}
template <typename Unit>
void load_row_if(bool valid, Unit& v, const Unit* p) {
  if (valid) v = *p;
}
template <typename Unit>
void store_row(Unit* p, Unit v) {
  *p = v;
}

inline void copy_async_16(void* shared, const void* global) { std::memcpy(shared, global, 16); }
inline void copy_async_group() {}
inline void copy_async_wait() {}
inline void copy_async_wait_but_last() {}

inline void wait_for_predecessor() {
  if (this_cluster->predecessor) this_cluster->predecessor->wait();
}
inline void let_successor_start() {}

inline thread_local std::optional<std::barrier<>::arrival_token> arrived;
inline void cluster_arrive_release() { arrived = this_cluster->barrier.arrive(); }
inline void cluster_arrive_relaxed() {
  cluster_arrive_release();
  if (this_block == this_cluster->late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}
inline void cluster_wait() { this_cluster->barrier.wait(*std::move(arrived)); }

template <typename T>
T* remote(T* shared, uint32_t rank) {
  const auto offset = reinterpret_cast<char*>(shared) - this_block->shared;
  return reinterpret_cast<T*>(this_cluster->blocks[rank]->shared + offset);
}
constexpr uint64_t kNotExpected = uint64_t{1} << 40;
inline void mailbox_init(uint64_t* mailbox) { __atomic_store_n(mailbox, kNotExpected, __ATOMIC_RELEASE); }
inline void mailbox_expect(uint64_t* mailbox, uint32_t bytes) {
  __atomic_fetch_sub(mailbox, kNotExpected - bytes, __ATOMIC_RELEASE);
}
template <typename T>
void mail(uint32_t* shared, T value, uint64_t* mailbox, uint32_t rank) {
  std::memcpy(remote(shared, rank), &value, sizeof(T));
  if (__atomic_fetch_sub(remote(mailbox, rank), sizeof(T), __ATOMIC_RELEASE) < sizeof(T)) {
    std::fputs("emulated kernel: more came to a mailbox than it was to hold\n", stderr);
    std::abort();
  }
}
inline void mailbox_wait(uint64_t* mailbox) {
  while (__atomic_load_n(mailbox, __ATOMIC_ACQUIRE) != 0) std::this_thread::yield();
}

}  // namespace hisparse_plugin::ptx
