// What the kernels of `affine_qdq` share: elements one by one, pairwise sums of a warp.
#pragma once

#include "cuda/device/chunk.cuh"
#include "cuda/device/codes.cuh"
#include "cuda/device/sum.cuh"
#include "formats/bits.h"
#include "halfbyte_config.h"
#include "ops/affine_qdq/affine_qdq_args.h"

namespace halfbyte::device {

using Memory = Element::Memory;

__device__ __forceinline__ float load_element(const void* x, i64 index) {
  return load(Element(), static_cast<const Memory*>(x)[index]);
}

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % 32); }

// Two sums of terms that the lanes of a warp have, block by block: as formats::PairwiseSum adds blocks, its
// stack spread over the lanes. Even lanes have the first sum, odd lanes the second. Up to 2^32 blocks.
template <class F>
class WarpSums {
 public:
  // `sum`: of the next block; the same in all even lanes, and in all odd ones.
  __device__ __forceinline__ void add(F sum) {
    int level = 0;
#pragma unroll 1
    for (; count_ >> level & 1; ++level) sum = part(level) + sum;
    if (lane_index() / 2 == level % 16) (level < 16 ? low_ : high_) = sum;
    ++count_;
  }
  __device__ __forceinline__ F total() const {
    F sum = 0;
#pragma unroll 1
    for (int level = 0; level < 32; ++level)
      if (count_ >> level & 1) sum = (count_ & ((1u << level) - 1)) != 0 ? part(level) + sum : part(level);
    return total_of(sum);
  }

 private:
  __device__ __forceinline__ F part(int level) const {
    return shuffle(level < 16 ? low_ : high_, level % 16 * 2 + lane_index() % 2);
  }

  F low_ = 0, high_ = 0;  // of levels below 16, from 16 on: lanes 2 k and 2 k + 1 have level k
  u32 count_ = 0;
};

}  // namespace halfbyte::device
