// Scales of one byte that are numbers of their own, no codes of double quantization: kByteScales says which.
#pragma once

#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

// Whether the sums are to be multiplied by the reciprocal of the global scale.
constexpr bool kGlobalScale = kByteScales == ScaleType::e4m3;

// Two neighbours. Exact, NaN stays NaN.
__device__ __forceinline__ void unpack_byte_scales(float (&to)[2], u16 bits) {
  const u8 first = static_cast<u8>(bits), second = static_cast<u8>(bits >> 8);
  if constexpr (kByteScales == ScaleType::e8m0) {
    to[0] = e8m0_to_f32(first);
    to[1] = e8m0_to_f32(second);
  } else {
#if HALFBYTE_DEVICE_ARCH >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bits));
    to[0] = f16_to_f32(static_cast<u16>(pair));
    to[1] = f16_to_f32(static_cast<u16>(pair >> 16));
#else
    to[0] = e4m3_to_f32(first);
    to[1] = e4m3_to_f32(second);
#endif
  }
}

// What sums are multiplied by when they are complete; `global_scale`: in `weight`, bytes.
__device__ __forceinline__ float global_factor(const u8* weight, i64 global_scale) {
  if constexpr (!kGlobalScale) return 1;
  return __frcp_rn(*reinterpret_cast<const float*>(weight + global_scale));
}

}  // namespace halfbyte::device
