// Codes in a bit stream, and codes as floating point numbers.
#pragma once

#include "cuda/device/memory.cuh"

namespace halfbyte::device {

// The bits of a chunk of kChunkBits (4, or whole bytes up to 64): number `chunk` of a stream of `num_bytes`
// bytes, which is aligned to 8 bytes.
template <int kChunkBits>
__device__ __forceinline__ u64 load_codes(const u8* codes, i64 chunk, i64 num_bytes) {
  if constexpr (kChunkBits == 64) return load_once(reinterpret_cast<const u64*>(codes) + chunk);
  if constexpr (kChunkBits == 32) return load_once(reinterpret_cast<const u32*>(codes) + chunk);
  if constexpr (kChunkBits == 16) return reinterpret_cast<const u16*>(codes)[chunk];
  if constexpr (kChunkBits == 8) return codes[chunk];
  if constexpr (kChunkBits == 4) return codes[chunk / 2] >> (chunk % 2 * 4);
  // Not a power of two: at most 48 bits and 16 before them, in two words, or what there is of them.
  const i64 bit = chunk * kChunkBits, word = bit / 32 * 4;
  u64 bits = 0;
  if (word + 8 <= num_bytes) {
    const u32* const words = reinterpret_cast<const u32*>(codes + word);
    bits = words[0] | static_cast<u64>(words[1]) << 32;
  } else {
#pragma unroll 1
    for (int i = 0; i < num_bytes - word; ++i) bits |= static_cast<u64>(codes[word + i]) << (8 * i);
  }
  return bits >> (bit % 32);
}

// An integer below 2^23 as a float plus 2^23, without a conversion.
__device__ __forceinline__ float above_2_23(u32 i) { return bit_cast<float>(0x4B000000u | i); }

}  // namespace halfbyte::device
