// Outputs, once their products are summed: what bias and y add, in f32 two neighbours at a time, or in f64.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

using Memory = Element::Memory;

// ---- In f32

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

// What is added to columns `col` and, where there is one, col + 1; `first`: of the bias, its first element.
template <class Args>
__device__ __forceinline__ FloatPair load_bias(const Args& args, i64 col, i64 first = 0) {
  if (args.bias == nullptr) return {0, 0};
  const Memory* const bias = static_cast<const Memory*>(args.bias) + first + col;
  return {load(Element(), bias[0]), col + 1 < args.out_cols ? load(Element(), bias[1]) : 0};
}

// Element `index` of y and, if `two`, the next, from their sums over all of x's columns.
template <class Args>
__device__ __forceinline__ void finish(const Args& args, i64 index, bool two, const FloatPair& bias,
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

// ---- In f64, rounded once

__device__ __forceinline__ float rounded(F32, double x) { return static_cast<float>(x); }
__device__ __forceinline__ u16 rounded(F16, double x) { return to_f16(x); }
__device__ __forceinline__ u16 rounded(BF16, double x) { return to_bf16(x); }

// Column `col` of row m of y. Sum: float or double.
template <class Args, class Sum>
__device__ __forceinline__ void write_sum(const Args& args, i64 m, i64 col, Sum sum) {
  Memory& y = static_cast<Memory*>(args.y)[m * args.out_cols + col];
  double total = static_cast<double>(sum);
  if (args.bias != nullptr)
    total += static_cast<double>(load(Element(), static_cast<const Memory*>(args.bias)[col]));
  if (args.accumulate) total += static_cast<double>(load(Element(), y));
  y = rounded(Element(), total);
}

}  // namespace halfbyte::device
