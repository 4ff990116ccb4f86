// What Python calls. The caller has checked shapes, dtypes and devices (kernels/swap_in.py); nothing else here knows
// tvm-ffi.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <cstdint>

#include "kernel.cuh"
#include "planned.cuh"

namespace hisparse_plugin {

using tvm::ffi::CUDADeviceGuard;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or whoever asks next, with SGLang's kernel in our place, is told of it
  TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
}

template <typename T>
T* data(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}
template <typename T>
T* data(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? data<T>(tensor.value()) : nullptr;
}
inline IndexArray index_array(const TensorView& tensor) { return {data<const void>(tensor), tensor.dtype().bits / 8}; }

inline int64_t row_stride_bytes(const TensorView& cache) { return cache.stride(0) * cache.dtype().bits / 8; }

// Elements from a request's row to the next.
inline uint32_t table_stride(const TensorView& table) {
  const int64_t stride = table.stride(0);
  if (stride < 0 || stride > UINT32_MAX) {
    TVM_FFI_THROW(ValueError) << "the rows of a table are " << stride << " elements apart: 2^32 - 1 is the most";
  }
  return static_cast<uint32_t>(stride);
}

// Where the device reads this memory. Host memory must be pinned or registered.
inline char* device_address(const TensorView& cache) {
  char* at = data<char>(cache);
  const auto type = cache.device().device_type;
  if (type == kDLCUDA || type == kDLCUDAManaged) return at;
  void* mapped = nullptr;
  if (cudaHostGetDevicePointer(&mapped, at, 0) != cudaSuccess) {
    cudaGetLastError();
    TVM_FFI_THROW(ValueError) << "host_cache is pageable host memory: allocate it pinned (pin_memory=True) or register "
                                 "it with cudaHostRegister";
  }
  return static_cast<char*>(mapped);
}

template <typename Params>
void launch(void (*kernel)(Params), const Params& params, int blocks, int threads, int cluster, size_t shared_bytes,
            DLDevice device) {
  const void* entry = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "this device has too little shared memory for this top_k and hot_buffer_size");
  }
  if (cluster > 8) {
    check(cudaFuncSetAttribute(entry, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster size");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
#if SGL_CUDA_ARCH >= 900
  attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
#endif
  Params copy = params;
  void* arguments[] = {&copy};
  check(cudaLaunchKernelExC(&config, entry, arguments), "swap-in launch");
}

// What a block of swap_in asks for.
template <int kTopK, int kHot, int kCluster, int kThreads, int kInFlight>
int64_t shared_bytes() {
  return sizeof(SharedMemory<SwapInConfig<kTopK, kHot, kCluster, kThreads, kInFlight>>);
}

template <int kTopK, int kHot, int kCluster, int kThreads, int kInFlight>
void swap_in(TensorView top_k_tokens, TensorView device_buffer_tokens, TensorView host_cache_locs,
             TensorView device_buffer_locs, TensorView host_cache, TensorView device_buffer,
             TensorView top_k_device_locs, TensorView req_pool_indices, TensorView seq_lens, TensorView lru_slots,
             Optional<TensorView> num_real_reqs, Optional<TensorView> tail_start, Optional<TensorView> miss_src,
             Optional<TensorView> miss_dst, Optional<TensorView> miss_count, Optional<TensorView> counters,
             int64_t item_size_bytes, bool skip_io) {
  using Config = SwapInConfig<kTopK, kHot, kCluster, kThreads, kInFlight>;
  const int64_t batch = top_k_tokens.size(0);
  if (batch == 0) return;
  const CUDADeviceGuard guard(top_k_tokens.device().device_id);
  SwapInParams p{};
  p.top_k_tokens = data<const int32_t>(top_k_tokens);
  p.device_buffer_locs = data<const int32_t>(device_buffer_locs);
  p.host_cache_locs = data<const int64_t>(host_cache_locs);
  p.host_rows = device_address(host_cache);
  p.req_pool_indices = index_array(req_pool_indices);
  p.seq_lens = index_array(seq_lens);
  if (tail_start.has_value()) p.tail_start = index_array(tail_start.value());
  p.num_real_reqs = data<const int32_t>(num_real_reqs);
  p.device_buffer_tokens = data<int32_t>(device_buffer_tokens);
  p.lru_slots = data<int16_t>(lru_slots);
  p.device_rows = data<char>(device_buffer);
  p.top_k_device_locs = data<int32_t>(top_k_device_locs);
  p.miss_src = data<int64_t>(miss_src);
  p.miss_dst = data<int32_t>(miss_dst);
  p.miss_count = data<int32_t>(miss_count);
  p.counters = data<unsigned long long>(counters);
  p.top_k_stride = top_k_tokens.stride(0);
  p.locs_out_stride = top_k_device_locs.stride(0);
  p.buffer_tokens_stride = table_stride(device_buffer_tokens);
  p.buffer_locs_stride = table_stride(device_buffer_locs);
  p.host_locs_stride = table_stride(host_cache_locs);
  p.lru_stride = table_stride(lru_slots);
  p.miss_src_stride = miss_src.has_value() ? miss_src.value().stride(0) : 0;
  p.miss_dst_stride = miss_dst.has_value() ? miss_dst.value().stride(0) : 0;
  p.host_row_stride = row_stride_bytes(host_cache);
  p.device_row_stride = row_stride_bytes(device_buffer);
  p.requests = static_cast<int32_t>(lru_slots.size(0));
  p.buffer_width = static_cast<int32_t>(device_buffer_locs.size(1));
  p.row_bytes = static_cast<int32_t>(item_size_bytes);
  p.row = row_shape(p.host_rows, p.host_row_stride, p.device_rows, p.device_row_stride, item_size_bytes);
  p.skip_io = skip_io;
  static_assert(!Config::kTokensInShared || sizeof(SharedMemory<Config>) <= kSharedBytes, "more than a block can have");
  launch(swap_in_kernel<Config>, p, static_cast<int>(batch) * kCluster, kThreads, kCluster,
         sizeof(SharedMemory<Config>), top_k_tokens.device());
}

template <int kThreads>
void copy_planned(TensorView miss_src, TensorView miss_dst, TensorView miss_count, Optional<TensorView> num_real_reqs,
                  TensorView host_cache, TensorView device_buffer, int64_t item_size_bytes, int64_t blocks) {
  if (miss_count.size(0) == 0) return;
  const CUDADeviceGuard guard(miss_src.device().device_id);
  CopyPlannedParams p{};
  p.miss_src = data<const int64_t>(miss_src);
  p.miss_dst = data<const int32_t>(miss_dst);
  p.miss_count = data<const int32_t>(miss_count);
  p.num_real_reqs = data<const int32_t>(num_real_reqs);
  p.host_rows = device_address(host_cache);
  p.device_rows = data<char>(device_buffer);
  p.src_stride = miss_src.stride(0);
  p.dst_stride = miss_dst.stride(0);
  p.host_row_stride = row_stride_bytes(host_cache);
  p.device_row_stride = row_stride_bytes(device_buffer);
  p.batch = static_cast<int32_t>(miss_count.size(0));
  p.row = row_shape(p.host_rows, p.host_row_stride, p.device_rows, p.device_row_stride, item_size_bytes);
  launch(copy_planned_kernel<kThreads>, p, static_cast<int>(blocks), kThreads, 1, 0, miss_src.device());
}

}  // namespace hisparse_plugin
