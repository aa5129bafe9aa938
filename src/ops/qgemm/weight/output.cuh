// y as the variants for packed weights store it: two neighbouring columns at a time.
#pragma once

#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

// Stores the two values, `second` only where y has such a column; added to what is there where `accumulate`.
// `whole`: both can be stored at once, and there are two.
__device__ __forceinline__ void store_two(Element::Memory* y, float (&v)[2], bool second, bool accumulate,
                                          bool whole) {
  if (accumulate) {
    v[0] += load(Element(), y[0]);
    if (second) v[1] += load(Element(), y[1]);
  }
  const u32 pair = store_pair(Element(), v[0], v[1]);
  if (whole) {
    *reinterpret_cast<u32*>(y) = pair;
  } else {
    y[0] = static_cast<u16>(pair);
    if (second) y[1] = static_cast<u16>(pair >> 16);
  }
}

}  // namespace halfbyte::device
