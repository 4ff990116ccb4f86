// How rows are cut into units that a lane copies. Plain C++.
#pragma once

#include <cstdint>
#include <numeric>

namespace hisparse_plugin {

// How a warp's lanes walk over rows: each row takes `slots` lanes, of which `units` copy one unit each.
struct RowWalk {
  int32_t unit;       // bytes: 16, 8, 4, 2 or 1
  int32_t units;      // in a row
  int32_t slots;      // `units`, or more where lanes are lined up with the source's lines (`line_mask`)
  int32_t line_mask;  // 127: a row's first lane is the one that would hold the start of its 128-byte line; 0: none
};

struct RowShape {
  RowWalk body;  // the widest unit that bases and strides of both sides are multiples of
  RowWalk tail;  // the bytes after the last whole unit; `units` may be 0
};

inline RowShape row_shape(const char* src, int64_t src_stride, const char* dst, int64_t dst_stride, int64_t bytes) {
  const int64_t src_grain = std::gcd(reinterpret_cast<int64_t>(src), src_stride);
  const int64_t grain = std::gcd(src_grain, std::gcd(reinterpret_cast<int64_t>(dst), dst_stride));
  const int32_t unit = static_cast<int32_t>(std::gcd(grain, int64_t{16}));
  RowWalk body{unit, static_cast<int32_t>(bytes / unit), 0, 0};
  body.slots = body.units > 0 ? body.units : 1;
  const int32_t shift = 128 - static_cast<int32_t>(std::gcd(src_grain, int64_t{128}));  // at most, from a line's start
  if (unit == 16 && shift > 0) {
    body.slots = (body.units + shift / 16 + 7) / 8 * 8;
    body.line_mask = 127;
  }
  const int32_t rest = static_cast<int32_t>(bytes % unit);
  return {body, {1, rest, rest, 0}};
}

}  // namespace hisparse_plugin
