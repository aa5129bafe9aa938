// Codes in a bit stream, and codes as floating point numbers.
#pragma once

#include "cuda/device/memory.cuh"

namespace halfbyte::device {

// Whether chunks of so many bits are words, so that none lies in two.
constexpr bool is_word(int chunk_bits) { return (chunk_bits & (chunk_bits - 1)) == 0; }

// From a byte on, a multiple of 4, 64 bits of a stream of `num_bytes` bytes, or what there is of them: in
// them lies a chunk of at most 48 bits that is no word and has 16 bits before it.
__device__ __forceinline__ u64 load_words(const u8* codes, i64 byte) {
  const u32* const words = reinterpret_cast<const u32*>(codes + byte);
  return words[0] | static_cast<u64>(words[1]) << 32;
}
__device__ __forceinline__ u64 load_last_words(const u8* codes, i64 byte, i64 num_bytes) {
  u64 bits = 0;
#pragma unroll 1
  for (int i = 0; i < num_bytes - byte; ++i) bits |= static_cast<u64>(codes[byte + i]) << (8 * i);
  return bits;
}

// The bits of a chunk of kChunkBits (4, or whole bytes up to 64): number `chunk` of a stream of `num_bytes`
// bytes, which is aligned to 8 bytes.
template <int kChunkBits>
__device__ __forceinline__ u64 load_codes(const u8* codes, i64 chunk, i64 num_bytes) {
  if constexpr (kChunkBits == 64) return load_once(reinterpret_cast<const u64*>(codes) + chunk);
  if constexpr (kChunkBits == 32) return load_once(reinterpret_cast<const u32*>(codes) + chunk);
  if constexpr (kChunkBits == 16) return reinterpret_cast<const u16*>(codes)[chunk];
  if constexpr (kChunkBits == 8) return codes[chunk];
  if constexpr (kChunkBits == 4) return codes[chunk / 2] >> (chunk % 2 * 4);
  const i64 bit = chunk * kChunkBits, byte = bit / 32 * 4;
  const u64 bits = byte + 8 <= num_bytes ? load_words(codes, byte) : load_last_words(codes, byte, num_bytes);
  return bits >> (bit % 32);
}

// Of n chunks that are no words, 32 apart from number `first` on, so that all begin at the same bit of
// theirs; those behind the end are anything. Returns that bit: what is before it is still to be shifted out,
// since all are to be on their way before one is waited for.
template <int kChunkBits, int n>
__device__ __forceinline__ int load_words(const u8* codes, i64 first, i64 num_bytes, u64 (&words)[n]) {
  constexpr int kStep = 32 * kChunkBits / 8;
  const i64 bit = first * kChunkBits, byte = bit / 32 * 4;
  if (byte + (n - 1) * kStep + 8 <= num_bytes) {
#pragma unroll
    for (int i = 0; i < n; ++i) words[i] = load_words(codes, byte + i * kStep);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) words[i] = 0;
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      const u64 last = load_last_words(codes, byte + i * kStep, min<i64>(num_bytes, byte + i * kStep + 8));
#pragma unroll
      for (int j = 0; j < n; ++j) words[j] = i == j ? last : words[j];
    }
  }
  return static_cast<int>(bit % 32);
}

// An integer below 2^23 as a float plus 2^23, without a conversion.
__device__ __forceinline__ float above_2_23(u32 i) { return bit_cast<float>(0x4B000000u | i); }

}  // namespace halfbyte::device
