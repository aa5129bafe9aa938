// Elements that a thread loads together, and the quotients of them.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"

namespace halfbyte::device {

// n elements of Type in words of 16 bytes.
template <class Type, int n>
struct alignas(16) ChunkOf {
  using Memory = typename Type::Memory;
  static constexpr int kWords4 = n * sizeof(Memory) / sizeof(Words4);
  Words4 words[kWords4];

  __device__ __forceinline__ typename Type::Compute operator[](int i) const {
    if constexpr (sizeof(Memory) == 2) {
      const u32 pair = words[i / 8].word[i / 2 % 4];
      return load(Type(), static_cast<u16>(i % 2 ? pair >> 16 : pair));
    } else if constexpr (sizeof(Memory) == 4) {
      return bit_cast<float>(words[i / 4].word[i % 4]);
    } else {
      const u32* const word = &words[i / 2].word[i % 2 * 2];
      return bit_cast<double>(word[0] | static_cast<u64>(word[1]) << 32);
    }
  }
  // Of a chunk that is still all 0.
  __device__ __forceinline__ void set(int i, Memory value) {
    if constexpr (sizeof(Memory) == 2) {
      words[i / 8].word[i / 2 % 4] |= static_cast<u32>(value) << (i % 2 * 16);
    } else if constexpr (sizeof(Memory) == 4) {
      words[i / 4].word[i % 4] = bit_cast<u32>(value);
    } else {
      words[i / 2].word[i % 2 * 2] = static_cast<u32>(bit_cast<u64>(value));
      words[i / 2].word[i % 2 * 2 + 1] = static_cast<u32>(bit_cast<u64>(value) >> 32);
    }
  }
};

// Number `chunk` of the chunks at x, which is aligned to 16 bytes.
template <class Chunk>
__device__ __forceinline__ Chunk load_chunk(const void* x, i64 chunk) {
  const Words4* const from = static_cast<const Words4*>(x) + chunk * Chunk::kWords4;
  Chunk result;
#pragma unroll
  for (int i = 0; i < Chunk::kWords4; ++i) result.words[i] = load_once(from + i);
  return result;
}

// The same of memory that this thread will write.
template <class Chunk>
__device__ __forceinline__ Chunk load_chunk_to_write(const void* x, i64 chunk) {
  const Words4* const from = static_cast<const Words4*>(x) + chunk * Chunk::kWords4;
  Chunk result;
#pragma unroll
  for (int i = 0; i < Chunk::kWords4; ++i) result.words[i] = load_to_write(from + i);
  return result;
}

// The range of the elements; of elements of 16 bits in a form that takes fewer instructions, see unpack().
template <class Type, int n>
__device__ __forceinline__ auto signed_range(const ChunkOf<Type, n>& x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(typename Type::Memory) == 2) {
    const Type type;
    u32 least = x.words[0].word[0], most = least;
#pragma unroll
    for (int i = 1; i < n / 2; ++i) {
      least = min_pair(type, least, x.words[i / 4].word[i % 4]);
      most = max_pair(type, most, x.words[i / 4].word[i % 4]);
    }
    least ^= 0x80008000u;
    return PairRange<Type>{
        max_pair(type, __byte_perm(least, most, 0x5410), __byte_perm(least, most, 0x7632))};
  } else
#endif
  {
    Range<typename Type::Compute> range = {-x[0], x[0]};
#pragma unroll
    for (int i = 1; i < n; ++i) range = join(range, Range<typename Type::Compute>{-x[i], x[i]});
    return range;
  }
}
// The same of the magnitudes: a symmetric range.
template <class Type, int n>
__device__ __forceinline__ auto magnitude_range(const ChunkOf<Type, n>& x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(typename Type::Memory) == 2) {
    const Type type;
    u32 largest = max_magnitude_pair(type, x.words[0].word[0], x.words[0].word[1]);
#pragma unroll
    for (int i = 2; i < n / 2; ++i) largest = max_magnitude_pair(type, largest, x.words[i / 4].word[i % 4]);
    return PairMagnitude<Type>{largest};
  } else
#endif
  {
    typename Type::Compute largest = formats::abs(x[0]);
#pragma unroll
    for (int i = 1; i < n; ++i) largest = max_or_nan(largest, formats::abs(x[i]));
    return Range<typename Type::Compute>{largest, largest};
  }
}

// 16 bytes of elements, rounded.
template <class Type>
__device__ __forceinline__ Words4 round_chunk(Type type, const typename Type::Compute* values) {
  constexpr int kBytes = sizeof(typename Type::Memory);
  Words4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBytes == 2) words.word[i] = store_pair(type, values[2 * i], values[2 * i + 1]);
    if constexpr (kBytes == 4) words.word[i] = bit_cast<u32>(values[i]);
    if constexpr (kBytes == 8) words.word[i] = static_cast<u32>(bit_cast<u64>(values[i / 2]) >> (i % 2 * 32));
  }
  return words;
}

// 1 / x, correctly rounded, for normal x of at most 2^125: what rcp.rn does on every target, without the
// branch for other exponents.
__device__ __forceinline__ float normal_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, -__fmaf_rn(x, y, -1.0f), y);
}

// x / scale, correctly rounded, away from under- and overflow. One correction is enough for a correctly
// rounded reciprocal: all pairs of mantissas whose quotient lies within 2^-18 units of a rounding boundary,
// beyond which the error of the correction cannot matter, were tried.
__device__ __forceinline__ float quotient(float x, float scale, float reciprocal) {
  const float q = __fmul_rn(x, reciprocal);
  return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
}

}  // namespace halfbyte::device
