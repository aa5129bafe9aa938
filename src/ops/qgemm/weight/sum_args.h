// What qgemm_sum is given: shared by host and device, freestanding.
#pragma once

#include "ops/qgemm/weight/experts_args.h"

namespace halfbyte {

inline constexpr int kQgemmSumThreads = 256;

// y [m / slots, out_cols] from the parts of its sums.
struct QgemmSumArgs {
  const void* partials;   // [parts][m][stride], f32 or f64
  ExpertsArgs experts;    // where rows are those of experts
  const void* forward_x;  // of the gradient of routing weights: [m, out_cols], and the gradient
  float* routing_grad;
  const void* bias;  // null: none
  void* y;
  formats::i64 m, out_cols,
      stride;  // stride: of the product, rounded up to pairs where outputs are made in f32
  formats::i64 parts;
  formats::i32 slots;  // rows of sums that make one of y
  bool swiglu;         // of experts: the product has 2 * out_cols columns
  bool pairs;          // in f32: two neighbours of y are at a multiple of their bytes
  bool accumulate;
};

}  // namespace halfbyte
