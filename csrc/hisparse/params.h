// What a launch is told. Plain data: no CUDA, no tvm-ffi.
#pragma once

#include <cstdint>

#include "../common/row_shape.h"

namespace hisparse_plugin {

// A vector of int32 or int64, whichever the caller has.
struct IndexArray {
  const void* data;       // nullptr: absent
  int32_t element_bytes;  // 4 or 8; values fit in 31 bits
};

// Entries answered without a copy, misses, bytes, requests; then requests by bits of their number of misses.
constexpr int kCounters = 18, kMissCounters = 4;

struct SwapInParams {
  // Read. A row of the request tables belongs to one request-pool slot.
  const int32_t* top_k_tokens;        // [batch, top_k] token positions; outside [0, seq_len): no token
  const int32_t* device_buffer_locs;  // [slots, >= hot + 1] device row of each buffer slot
  const int64_t* host_cache_locs;     // [slots, >= seq_len] host row of each token
  const char* host_rows;              // host memory the device can read; row r at r * host_row_stride
  IndexArray req_pool_indices;        // [batch] request-pool slot
  IndexArray seq_lens;                // [batch] tokens, the newest included
  IndexArray tail_start;              // [batch] first token of the resident tail, or absent
  const int32_t* num_real_reqs;       // [1] rows after it are padding; nullptr: none are

  // Read and written.
  int32_t* device_buffer_tokens;  // [slots, >= hot] token held by each buffer slot, -1: none
  int16_t* lru_slots;             // [slots, hot] buffer slots, next to be evicted first

  // Written.
  char* device_rows;           // row r at r * device_row_stride
  int32_t* top_k_device_locs;  // [batch, top_k] device row of each selected token, -1: none
  int64_t* miss_src;           // [batch, >= top_k] host rows copied, or nullptr
  int32_t* miss_dst;           // [batch, >= top_k] device rows written, with miss_src
  int32_t* miss_count;         // [batch], with miss_src
  unsigned long long* counters;  // [kCounters], added to; or nullptr

  // Strides between rows: elements for tables, bytes for the caches.
  int64_t top_k_stride, locs_out_stride;
  uint32_t buffer_tokens_stride, buffer_locs_stride, host_locs_stride, lru_stride;
  int64_t miss_src_stride, miss_dst_stride, host_row_stride, device_row_stride;
  int32_t requests;      // rows that all tables have
  int32_t buffer_width;  // slots in a row of device_buffer_locs: the hot buffer and the extra page
  int32_t row_bytes;
  RowShape row;
  bool skip_io;  // plan only: rows are not copied
};

struct CopyPlannedParams {
  const int64_t* miss_src;       // [batch, ...] host rows
  const int32_t* miss_dst;       // [batch, ...] device rows
  const int32_t* miss_count;     // [batch]
  const int32_t* num_real_reqs;  // [1], or nullptr
  const char* host_rows;
  char* device_rows;
  int64_t src_stride, dst_stride, host_row_stride, device_row_stride;
  int32_t batch;
  RowShape row;
};

}  // namespace hisparse_plugin
