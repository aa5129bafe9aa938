// What the kernels of `quantize_linear` are given: shared by host and device, freestanding.
#pragma once

#include "formats/codec.h"

namespace halfbyte {

// How zero points are stored; `none` is a zero point of 0.
enum class ZeroType : formats::u8 { none, i32, i8, u8, i4, u4 };

// One scale for each value of scale_index.
struct LinearScales {
  void* scales;
  void* zeros;
  formats::ScaleType scale_type;
  ZeroType zero_type;
  formats::i32 q_min, q_max;
  // Of packed zero points: a row of `zero_cols` elements takes `zero_row_bytes` bytes.
  formats::i64 zero_cols, zero_row_bytes;
};

}  // namespace halfbyte
