// What the kernels of variant qgemm_sm80 do with finished sums.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/types.cuh"
#include "ops/qgemm/qgemm_sm80_args.h"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// Columns `col` and, where there is one, col + 1 of row `row` of y, from sums over all of x's columns.
__device__ __forceinline__ void finish(const QgemmSm80Args& args, i64 row, i64 col, float first, float second) {
  const bool two = col + 1 < args.out_cols;
  if (args.bias != nullptr) {
    const u16* const bias = static_cast<const u16*>(args.bias) + col;
    first += load(Element(), bias[0]);
    if (two) second += load(Element(), bias[1]);
  }
  u16* const y = static_cast<u16*>(args.y) + row * args.out_cols + col;
  if (args.pairs) {
    u32* const pair = reinterpret_cast<u32*>(y);
    if (args.accumulate) {
      const u32 before = *pair;
      first += load(Element(), static_cast<u16>(before));
      second += load(Element(), static_cast<u16>(before >> 16));
    }
    *pair = store_pair(Element(), first, second);
    return;
  }
  if (args.accumulate) {
    first += load(Element(), y[0]);
    if (two) second += load(Element(), y[1]);
  }
  y[0] = store(Element(), first);
  if (two) y[1] = store(Element(), second);
}

#endif

}  // namespace halfbyte::device
