// Pairwise sums (formats/pairwise.h) of elements that lie side by side in a thread, then over lanes.
#pragma once

#include "cuda/device/reduce.cuh"
#include "formats/pairwise.h"

namespace halfbyte::device {

// n: a power of two.
template <int n, class F>
__device__ __forceinline__ F tree_sum(const F (&terms)[n]) {
  if constexpr (n == 1) {
    return terms[0];
  } else {
    F sums[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) sums[i] = terms[2 * i] + terms[2 * i + 1];
    return tree_sum(sums);
  }
}

// Over the lanes whose numbers differ in the bits from `first` up to, not including, `end`; all of them get
// it.
template <class F>
__device__ __forceinline__ F lane_sum(F value, int first, int end) {
  for (int mask = first; mask < end; mask *= 2) value = value + shuffle_xor(value, mask);
  return value;
}

// One level of two sums at once: of two lanes that differ in bit `mask`, the one without it gets the sum of
// their a, the other that of their b.
template <class F>
__device__ __forceinline__ F fold_sums(F a, F b, int mask) {
  const bool upper = (threadIdx.x & static_cast<u32>(mask)) != 0;
  return (upper ? b : a) + shuffle_xor(upper ? a : b, mask);
}

}  // namespace halfbyte::device
