// What kernels for few rows of f32 have in common.
#pragma once

#include "cuda/device/types.cuh"

namespace halfbyte::device {

// A slot of a ring of bulk copies, and the parity of its phase.
struct RingSlot {
  int index = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance(int slots) {
    if (++index == slots) {
      index = 0;
      parity ^= 1;
    }
  }
};

// y, of column `col`: the sum, with what is added to it rounded once.
template <class Args>
__device__ __forceinline__ void store_sum(const Args& args, float& y, i64 col, float sum) {
  if (args.bias != nullptr || args.accumulate) {
    double total = static_cast<double>(sum);
    if (args.bias != nullptr) total += static_cast<double>(args.bias[col]);
    if (args.accumulate) total += static_cast<double>(y);
    sum = static_cast<float>(total);
  }
  y = sum;
}

}  // namespace halfbyte::device
