// What the kernels of variant qgemm_sm80 do with finished sums.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/types.cuh"
#include "ops/qgemm/qgemm_sm80_args.h"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// Of two neighbours in a row of y.
struct alignas(8) PairSums {
  float first, second;
};

// What is added to columns `col` and, where there is one, col + 1.
struct PairBias {
  float first, second;
};
__device__ __forceinline__ PairBias load_bias(const QgemmSm80Args& args, i64 col) {
  if (args.bias == nullptr) return {0, 0};
  const u16* const bias = static_cast<const u16*>(args.bias) + col;
  return {load(Element(), bias[0]), col + 1 < args.out_cols ? load(Element(), bias[1]) : 0};
}

// Element `index` of y and, if `two`, the next, from their sums over all of x's columns.
__device__ __forceinline__ void finish(const QgemmSm80Args& args, i64 index, bool two, const PairBias& bias,
                                       float first, float second) {
  u16* const y = static_cast<u16*>(args.y) + index;
  first += bias.first;
  second += bias.second;
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
  y[0] = store(Element(), args.accumulate ? first + load(Element(), y[0]) : first);
  if (two) y[1] = store(Element(), args.accumulate ? second + load(Element(), y[1]) : second);
}

#endif

}  // namespace halfbyte::device
