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

// Codes of 4 bits, in the lower bits of each half, as elements. Exact: they are the lower bits of an element
// to which 128 (f16: 1024) is added, and that is subtracted.
HALFBYTE_FN u32 pair_above_codes(F16) { return 0x64006400; }
HALFBYTE_FN u32 pair_above_codes(BF16) { return 0x43004300; }
template <class T>
__device__ __forceinline__ u32 integer_pair(T, u32 codes) {
  const u32 above = pair_above_codes(T());
  return subtract_pair(T(), (codes & 0x000F000Fu) | above, above);
}
#endif

HALFBYTE_FN u32 same_pair(F16, float x) { return f32_to_f16(x) * 0x10001u; }
HALFBYTE_FN u32 same_pair(BF16, float x) { return f32_to_bf16(x) * 0x10001u; }

// Two numbers of E4M3, in the lower bytes, as elements. Exact; NaN stays NaN.
template <class T>
__device__ __forceinline__ u32 e4m3_pair(T, u32 bytes) {
#if HALFBYTE_DEVICE_ARCH >= 890
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(bytes)));
  if constexpr (T::kScaleType == ScaleType::f16) return pair;
  return store_pair(T(), f16_to_f32(static_cast<u16>(pair)), f16_to_f32(static_cast<u16>(pair >> 16)));
#else
  return store_pair(T(), e4m3_to_f32(static_cast<u8>(bytes)), e4m3_to_f32(static_cast<u8>(bytes >> 8)));
#endif
}

constexpr float kMagic = 8388608.0f;  // 2^23
// Byte kByte of a word, plus 2^23.
template <int kByte>
__device__ __forceinline__ float byte_above_2_23(u32 word) {
  return bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7540 | kByte));
}
// 8-bit codes as a pair of elements: bytes of two words, less `zero`, to which 2^23 is added. Exact: integers
// up to 256. Of floating codes there is no zero.
template <int kLow, int kHigh>
__device__ __forceinline__ u32 decode_bytes(u32 low, u32 high, float zero) {
  if constexpr (kFloating) return e4m3_pair(Element(), __byte_perm(low, high, kLow | (4 + kHigh) << 4));
  return store_pair(Element(), byte_above_2_23<kLow>(low) - zero, byte_above_2_23<kHigh>(high) - zero);
}

// What code 0 stands for, but for codes of 4 bits; of asymmetric integers and affine formats codes are as
// stored.
[[maybe_unused]] constexpr int kLowestCode = kAsymmetric || kAffine ? 0 : -(1 << (kBits - 1));
// The values of two bytes of a word of codes, one a byte.
template <int kByte>
__device__ __forceinline__ float byte_value(u32 word) {
  if constexpr (kFloating) return e4m3_to_f32(static_cast<u8>(word >> (8 * kByte)));
  return byte_above_2_23<kByte>(word) - (kMagic - kLowestCode);
}
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(BF16, u32 word) {
  if constexpr (kFloating) return e4m3_pair(BF16(), __byte_perm(word, 0, kFirst | kSecond << 4));
  return __byte_perm(bit_cast<u32>(byte_value<kFirst>(word)), bit_cast<u32>(byte_value<kSecond>(word)),
                     0x7632);  // 8 bits: exact
}
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(F16, u32 word) {
  if constexpr (kFloating) return e4m3_pair(F16(), __byte_perm(word, 0, kFirst | kSecond << 4));
  constexpr u32 kMinus =
      same_pair(F16(), static_cast<float>(kLowestCode - 1024));  // 0x6400 + code is 1024 + code
  constexpr u32 kOne = same_pair(F16(), 1);
  return fma_pair(F16(), __byte_perm(word, 0x64646464u, 0x4040 | kFirst | kSecond << 8), kOne, kMinus);
}

#endif

}  // namespace halfbyte::device
