// Two 16-bit values in a word: 8-bit codes as such, and arithmetic that rounds once.
#pragma once

#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// a * b + c of both values, each rounded once.
__device__ __forceinline__ u32 fma_pair(F16, u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 fma_pair(BF16, u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

#if HALFBYTE_DEVICE_ARCH >= 900
__device__ __forceinline__ u32 subtract_pair(F16, u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 subtract_pair(BF16, u32 a, u32 b) {
  u32 d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 multiply_pair(F16, u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 multiply_pair(BF16, u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
#endif

HALFBYTE_FN u32 same_pair(F16, float x) { return f32_to_f16(x) * 0x10001u; }
HALFBYTE_FN u32 same_pair(BF16, float x) { return f32_to_bf16(x) * 0x10001u; }

constexpr float kMagic = 8388608.0f;  // 2^23
// Byte kByte of a word, plus 2^23.
template <int kByte>
__device__ __forceinline__ float byte_above_2_23(u32 word) {
  return bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7540 | kByte));
}
// 8-bit codes as a pair of elements: bytes of two words, less `zero`, to which 2^23 is added. Exact: integers
// up to 256.
template <int kLow, int kHigh>
__device__ __forceinline__ u32 decode_bytes(u32 low, u32 high, float zero) {
  return store_pair(Element(), byte_above_2_23<kLow>(low) - zero, byte_above_2_23<kHigh>(high) - zero);
}

// What code 0 stands for, but for codes of 4 bits; of asymmetric integers and affine formats codes are as
// stored.
[[maybe_unused]] constexpr int kLowestCode = kAsymmetric || kAffine ? 0 : -(1 << (kBits - 1));
// The values of two bytes of a word of codes, one a byte.
template <int kByte>
__device__ __forceinline__ float byte_value(u32 word) {
  return byte_above_2_23<kByte>(word) - (kMagic - kLowestCode);
}
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(BF16, u32 word) {
  return __byte_perm(bit_cast<u32>(byte_value<kFirst>(word)), bit_cast<u32>(byte_value<kSecond>(word)),
                     0x7632);  // 8 bits: exact
}
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(F16, u32 word) {
  constexpr u32 kMinus =
      same_pair(F16(), static_cast<float>(kLowestCode - 1024));  // 0x6400 + code is 1024 + code
  constexpr u32 kOne = same_pair(F16(), 1);
  return fma_pair(F16(), __byte_perm(word, 0x64646464u, 0x4040 | kFirst | kSecond << 8), kOne, kMinus);
}

#endif

}  // namespace halfbyte::device
