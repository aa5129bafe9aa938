// What the kernels of variant qgemm_sm80 do with finished sums.
#pragma once

#include "cuda/device/bulk.cuh"
#include "cuda/device/types.cuh"
#include "ops/qgemm/sm80/sm80_args.h"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

using Memory = Element::Memory;

// Two neighbours in a row.
struct alignas(8) FloatPair {
  float first, second;
};
__device__ __forceinline__ FloatPair load_neighbours(F32, const float* x) {
  return *reinterpret_cast<const FloatPair*>(x);
}
template <class T>
__device__ __forceinline__ FloatPair load_neighbours(T, const u16* x) {
  const u32 pair = *reinterpret_cast<const u32*>(x);
  return {load(T(), static_cast<u16>(pair)), load(T(), static_cast<u16>(pair >> 16))};
}
__device__ __forceinline__ void store_neighbours(F32, float* x, const FloatPair& pair) {
  *reinterpret_cast<FloatPair*>(x) = pair;
}
template <class T>
__device__ __forceinline__ void store_neighbours(T, u16* x, const FloatPair& pair) {
  *reinterpret_cast<u32*>(x) = store_pair(T(), pair.first, pair.second);
}

// What is added to columns `col` and, where there is one, col + 1.
__device__ __forceinline__ FloatPair load_bias(const QgemmSm80Args& args, i64 col) {
  if (args.bias == nullptr) return {0, 0};
  const Memory* const bias = static_cast<const Memory*>(args.bias) + col;
  return {load(Element(), bias[0]), col + 1 < args.out_cols ? load(Element(), bias[1]) : 0};
}

// Element `index` of y and, if `two`, the next, from their sums over all of x's columns.
__device__ __forceinline__ void finish(const QgemmSm80Args& args, i64 index, bool two, const FloatPair& bias,
                                       FloatPair sums) {
  Memory* const y = static_cast<Memory*>(args.y) + index;
  sums.first += bias.first;
  sums.second += bias.second;
  if (args.pairs) {
    if (args.accumulate) {
      const FloatPair before = load_neighbours(Element(), y);
      sums.first += before.first;
      sums.second += before.second;
    }
    store_neighbours(Element(), y, sums);
    return;
  }
  y[0] = store(Element(), args.accumulate ? sums.first + load(Element(), y[0]) : sums.first);
  if (two) y[1] = store(Element(), args.accumulate ? sums.second + load(Element(), y[1]) : sums.second);
}

#endif

}  // namespace halfbyte::device
