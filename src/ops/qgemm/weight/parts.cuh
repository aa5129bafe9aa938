// f32 as sums of three bf16, which together have all its 24 bits: products of parts make products of f32.
#pragma once

#include "cuda/device/mma.cuh"
#include "ops/qgemm/weight/finish.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// Pairs of the parts of two values, from large to small. Integers up to 256 are one part.
template <int n>
struct alignas(n == 3 ? 16 : 4) Parts {
  u32 part[n];
};

// Of these and what is larger, rounding to bf16 may make infinity.
constexpr float kCutLimit = 0x1.ffp127f;

// Each part is what is left, rounded to the nearest bf16.
__device__ __forceinline__ Parts<3> split_pair(const FloatPair& pair) {
  // Infinity and NaN, and what would be rounded to infinity, are whole in the last part: products with it
  // have the first part of the other operand only, and its sign.
  const bool is_large[2] = {!(fabsf(pair.first) < kCutLimit), !(fabsf(pair.second) < kCutLimit)};
  FloatPair left = {is_large[0] ? 0 : pair.first, is_large[1] ? 0 : pair.second};
  Parts<3> parts;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 part = store_pair(BF16(), left.first, left.second);
    parts.part[i] = part;
    left.first -= bit_cast<float>(part << 16);
    left.second -= bit_cast<float>(part & 0xFFFF0000u);
  }
  parts.part[2] =
      store_pair(BF16(), is_large[0] ? pair.first : left.first, is_large[1] ? pair.second : left.second);
  return parts;
}

// The same of numbers below kCutLimit, by half as many instructions: the first part is rounded,
// half away from zero, and of what is left the next one is cut off.
__device__ __forceinline__ Parts<3> cut_pair(FloatPair left) {
  Parts<3> parts;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const u32 half = i == 0 ? 0x8000 : 0;
    const u32 first = bit_cast<u32>(left.first) + half, second = bit_cast<u32>(left.second) + half;
    parts.part[i] = __byte_perm(first, second, 0x7632);
    left.first -= bit_cast<float>(first & 0xFFFF0000u);
    left.second -= bit_cast<float>(second & 0xFFFF0000u);
  }
  return parts;
}

// d += a * b. Small products first. Those that are left out are below 2^-23 of the whole.
template <int n>
__device__ __forceinline__ void multiply_parts(float (&d)[4], const Parts<n> (&a)[4],
                                               const Parts<3> (&b)[2]) {
#pragma unroll
  for (int sum = 2; sum >= 0; --sum) {
#pragma unroll
    for (int i = min(sum, n - 1); i >= 0; --i) {
      const int j = sum - i;
      const u32 parts_of_a[4] = {a[0].part[i], a[1].part[i], a[2].part[i], a[3].part[i]};
      const u32 parts_of_b[2] = {b[0].part[j], b[1].part[j]};
      mma(BF16(), d, parts_of_a, parts_of_b);
    }
  }
}

#endif

}  // namespace halfbyte::device
