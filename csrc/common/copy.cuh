// A warp copies up to 32 scattered rows.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "row_shape.h"

namespace hisparse_plugin {

namespace detail {

// The link moves whole 128-byte lines and rows may start inside one. With `line_mask`, groups of eight lanes match the
// source's lines, so that no line is asked for by two instructions.
//
// `kInFlight` loads per lane are outstanding at any time: a round trip to host memory takes about 2 us.
template <typename Unit, int kInFlight>
__device__ __forceinline__ void copy_units(const char* src, char* dst, int rows, const RowWalk& walk) {
  const int lane = threadIdx.x % 32;
  const int rows_per_step = 32 / walk.slots, slots_per_step = 32 % walk.slots;
  int row = lane / walk.slots, slot = lane % walk.slots;

  Unit value[kInFlight]{};
  Unit* to[kInFlight];  // nullptr: this lane has nothing to store
  auto issue = [&](Unit& v, Unit*& d) {
    const uint64_t row_src = __shfl_sync(~0u, reinterpret_cast<uint64_t>(src), row);
    const uint64_t row_dst = __shfl_sync(~0u, reinterpret_cast<uint64_t>(dst), row);
    const int unit = slot - static_cast<int>(row_src & walk.line_mask) / int(sizeof(Unit));
    const bool valid = row < rows && unit >= 0 && unit < walk.units;
    ptx::load_row_if(valid, v, reinterpret_cast<const Unit*>(row_src) + unit);
    d = valid ? reinterpret_cast<Unit*>(row_dst) + unit : nullptr;
    row += rows_per_step;
    slot += slots_per_step;
    if (slot >= walk.slots) {
      slot -= walk.slots;
      ++row;
    }
  };
  const int total = rows * walk.slots;
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) issue(value[u], to[u]);
  for (int done = 0; done < total; done += 32 * kInFlight) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (to[u] != nullptr) ptx::store_row(to[u], value[u]);
      to[u] = nullptr;
      if (done + (kInFlight + u) * 32 < total) issue(value[u], to[u]);
    }
  }
}

}  // namespace detail

// Lane r holds row r's addresses, for r < rows <= 32; every lane of the warp calls.
template <int kInFlight>
__device__ __forceinline__ void copy_rows(const char* src, char* dst, int rows, const RowShape& shape) {
  const auto narrow = [&]<typename Unit>(Unit) {
    detail::copy_units<Unit, 1>(src, dst, rows, shape.body);
  };
  switch (shape.body.unit) {
    case 16: detail::copy_units<uint4, kInFlight>(src, dst, rows, shape.body); break;
    case 8: narrow(uint64_t{}); break;
    case 4: narrow(uint32_t{}); break;
    case 2: narrow(uint16_t{}); break;
    default: narrow(uint8_t{}); break;
  }
  if (shape.tail.units != 0) {
    const int at = shape.body.unit * shape.body.units;
    detail::copy_units<uint8_t, 1>(src + at, dst + at, rows, shape.tail);
  }
}

}  // namespace hisparse_plugin
