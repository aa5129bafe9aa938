// What both products of qgemm_sm90_transposed use: words of codes, and the places of sums.
#pragma once

#include "cuda/device/types.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
  return y;
}

// The bits of `mask` from a, the others from b.
__device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
  u32 y;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(y) : "r"(mask), "r"(a), "r"(b));
  return y;
}

template <int n>
struct alignas(4 * n) Words {
  u32 word[n];
};

// Where sums lie in the exchange, in words from those of a team on: of a token and of the first of a pair of
// columns of the tile; kOdd on, of the second.
struct SumPlace {
  int word, token, pair;
};

#endif

}  // namespace halfbyte::device
