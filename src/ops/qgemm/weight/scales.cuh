// Scales and biases as a packed weight has them: of two neighbouring rows at a time.
#pragma once

#include "cuda/device/types.cuh"
#include "ops/qgemm/weight/byte_scales.cuh"

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

// Scales of two bytes are bf16 or f16, an argument of most kernels says which; bf16 ones go with bf16 x alone
// where the weight is common (common_cuda.h).
HALFBYTE_FN bool may_have_bf16_scales(BF16) { return true; }
template <class T>
HALFBYTE_FN bool may_have_bf16_scales(T) {
  return false;
}
template <class Args>
__device__ __forceinline__ bool has_bf16_scales(const Args& args) {
  return may_have_bf16_scales(Element()) && args.bf16_scales;
}

// Two neighbouring scales or biases, the first of an even row, from how they are stored.
template <int kBytes>
__device__ __forceinline__ void unpack_scales(float (&to)[2], typename Stored<kBytes>::Type bits, bool bf16) {
  if constexpr (kBytes == 1) {
    unpack_byte_scales(to, bits);
  } else if constexpr (kBytes == 4) {
    to[0] = bit_cast<float>(static_cast<u32>(bits));
    to[1] = bit_cast<float>(static_cast<u32>(bits >> 32));
  } else if (bf16) {
    to[0] = bit_cast<float>(static_cast<u32>(bits) << 16);
    to[1] = bit_cast<float>(static_cast<u32>(bits) & 0xFFFF0000u);
  } else {
    to[0] = f16_to_f32(static_cast<u16>(bits));
    to[1] = f16_to_f32(static_cast<u16>(bits >> 16));
  }
}

template <int kBytes>
__device__ __forceinline__ void load_scales(float (&to)[2], const u8* from, bool bf16) {
  unpack_scales<kBytes>(to, *reinterpret_cast<const typename Stored<kBytes>::Type*>(from), bf16);
}

}  // namespace halfbyte::device
