// What qgemm_sum is given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

inline constexpr int kQgemmSumThreads = 256;

// y [m, out_cols] from the parts of its sums.
struct QgemmSumArgs {
  const void* partials;  // [parts][m][stride], f32 or f64
  const void* bias;      // null: none
  void* y;
  formats::i64 m, out_cols, stride;  // stride: out_cols, rounded up to pairs where outputs are made in f32
  formats::i64 parts;
  bool pairs;  // in f32: two neighbours of y are at a multiple of their bytes
  bool accumulate;
};

}  // namespace halfbyte
