// Scales and biases as a packed weight has them: of two neighbouring rows at a time.
#pragma once

#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

// Two neighbours of so many bytes each.
template <int kBytes>
struct Stored;
template <>
struct Stored<4> {
  using Type = u64;
};
template <>
struct Stored<2> {
  using Type = u32;
};
template <>
struct Stored<1> {
  using Type = u16;
};

// Two neighbouring scales or biases as they are stored; the first of an even row.
using StoredScales = Stored<scale_bytes(kScaleType)>::Type;
__device__ __forceinline__ void unpack_scales(float (&to)[2], StoredScales bits) {
  if constexpr (kScaleType == ScaleType::f32) {
    to[0] = bit_cast<float>(static_cast<u32>(bits));
    to[1] = bit_cast<float>(static_cast<u32>(static_cast<u64>(bits) >> 32));
  } else if constexpr (kScaleType == ScaleType::bf16) {
    to[0] = bit_cast<float>(static_cast<u32>(bits) << 16);
    to[1] = bit_cast<float>(static_cast<u32>(bits) & 0xFFFF0000u);
  } else {
    to[0] = f16_to_f32(static_cast<u16>(bits));
    to[1] = f16_to_f32(static_cast<u16>(bits >> 16));
  }
}

__device__ __forceinline__ void load_scales(float (&to)[2], const u8* from) {
  unpack_scales(to, *reinterpret_cast<const StoredScales*>(from));
}

}  // namespace halfbyte::device
