// Pairwise sums (formats/pairwise.h) of elements that lie side by side in a thread, then over lanes.
#pragma once

#include "cuda/device/reduce.cuh"
#include "formats/pairwise.h"

namespace halfbyte::device {

// n: a power of two.
template <int n, class F>
__device__ __forceinline__ F tree_sum(const F (&terms)[n]) {
  F level[n];
#pragma unroll
  for (int i = 0; i < n; ++i) level[i] = terms[i];
#pragma unroll
  for (int m = n / 2; m > 0; m /= 2) {
#pragma unroll
    for (int i = 0; i < m; ++i) level[i] = level[2 * i] + level[2 * i + 1];
  }
  return level[0];
}

// Over the lanes whose numbers differ in the bits from `first` up to, not including, `end`; all of them get it.
template <class F>
__device__ __forceinline__ F lane_sum(F value, int first, int end) {
  for (int mask = first; mask < end; mask *= 2) value = value + shuffle_xor(value, mask);
  return value;
}

// One level of two sums at once: of two lanes that differ in bit `mask`, the one without it gets the sum of their a,
// the other that of their b.
template <class F>
__device__ __forceinline__ F fold_sums(F a, F b, int mask) {
  const bool upper = (threadIdx.x & static_cast<u32>(mask)) != 0;
  return (upper ? b : a) + shuffle_xor(upper ? a : b, mask);
}

}  // namespace halfbyte::device
