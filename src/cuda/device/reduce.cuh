// Ranges: largest of -x and of x, over lanes, as integers of the same order, and past NaN.
#pragma once

#include "cuda/device/types.cuh"

namespace halfbyte::device {

using namespace formats;

inline constexpr u32 kAllLanes = 0xFFFFFFFFu;

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  if constexpr (sizeof(T) == 8) {
    const u64 bits = bit_cast<u64>(value);
    return bit_cast<T>(static_cast<u64>(__shfl_xor_sync(kAllLanes, static_cast<u32>(bits), mask)) |
                       static_cast<u64>(__shfl_xor_sync(kAllLanes, static_cast<u32>(bits >> 32), mask))
                           << 32);
  } else {
    return bit_cast<T>(__shfl_xor_sync(kAllLanes, bit_cast<u32>(value), mask));
  }
}
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  if constexpr (sizeof(T) == 8) {
    const u64 bits = bit_cast<u64>(value);
    return bit_cast<T>(static_cast<u64>(__shfl_sync(kAllLanes, static_cast<u32>(bits), lane)) |
                       static_cast<u64>(__shfl_sync(kAllLanes, static_cast<u32>(bits >> 32), lane)) << 32);
  } else {
    return bit_cast<T>(__shfl_sync(kAllLanes, bit_cast<u32>(value), lane));
  }
}

// max(a, b); NaN if one is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return !(a <= b) ? (b == b ? a : b) : b;
#endif
}
__device__ __forceinline__ double max_or_nan(double a, double b) { return !(a <= b) ? (b == b ? a : b) : b; }

// The largest of -x and of x; NaN if one is NaN, and of nothing -infinity.
template <class F>
struct Range {
  F low, high;
};
template <class F>
__device__ __forceinline__ Range<F> join(const Range<F>& a, const Range<F>& b) {
  return {max_or_nan(a.low, b.low), max_or_nan(a.high, b.high)};
}
template <class F>
__device__ __forceinline__ bool is_finite(const Range<F>& range) {
  return formats::is_finite(range.low) && formats::is_finite(range.high);
}
template <class F>
__device__ __forceinline__ Range<F> no_range() {
  return {-bit_cast<F>(Float<F>::kInfinity), -bit_cast<F>(Float<F>::kInfinity)};
}
template <class F>
__device__ __forceinline__ Range<F> shuffle_xor(const Range<F>& range, int mask) {
  return {shuffle_xor(range.low, mask), shuffle_xor(range.high, mask)};
}
template <class F>
__device__ __forceinline__ const Range<F>& unpack(const Range<F>& range) {
  return range;
}

#if __CUDA_ARCH__ >= 800
// Two elements of 16 bits at a time; NaN if one is NaN.
__device__ __forceinline__ u32 max_pair(BF16, u32 a, u32 b) {
  u32 y;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 max_pair(F16, u32 a, u32 b) {
  u32 y;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 min_pair(BF16, u32 a, u32 b) {
  u32 y;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ u32 min_pair(F16, u32 a, u32 b) {
  u32 y;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The larger magnitude of each; the sign is not defined.
__device__ __forceinline__ u32 max_magnitude_pair(BF16 type, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_pair(type, a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}
__device__ __forceinline__ u32 max_magnitude_pair(F16 type, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
  u32 y;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return max_pair(type, a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

// The largest magnitudes of elements of 16 bits, in the halves of a word; as a range, the symmetric one.
template <class Type>
struct PairMagnitude {
  u32 pair;
};
template <class Type>
__device__ __forceinline__ PairMagnitude<Type> join(PairMagnitude<Type> a, PairMagnitude<Type> b) {
  return {max_magnitude_pair(Type(), a.pair, b.pair)};
}
template <class Type>
__device__ __forceinline__ PairMagnitude<Type> shuffle_xor(PairMagnitude<Type> range, int mask) {
  return {shuffle_xor(range.pair, mask)};
}
template <class Type>
__device__ __forceinline__ Range<float> unpack(PairMagnitude<Type> range) {
  const float magnitude = max_or_nan(load(Type(), static_cast<u16>(range.pair & 0x7FFFu)),
                                     load(Type(), static_cast<u16>(range.pair >> 16 & 0x7FFFu)));
  return {magnitude, magnitude};
}

// A range of elements of 16 bits: low and high in the halves of a word, so that both travel in one shuffle.
template <class Type>
struct PairRange {
  u32 pair;
};
template <class Type>
__device__ __forceinline__ PairRange<Type> join(PairRange<Type> a, PairRange<Type> b) {
  return {max_pair(Type(), a.pair, b.pair)};
}
template <class Type>
__device__ __forceinline__ PairRange<Type> shuffle_xor(PairRange<Type> range, int mask) {
  return {shuffle_xor(range.pair, mask)};
}
template <class Type>
__device__ __forceinline__ Range<float> unpack(PairRange<Type> range) {
  return {load(Type(), static_cast<u16>(range.pair)), load(Type(), static_cast<u16>(range.pair >> 16))};
}
#endif

// An unsigned integer that orders like x (not NaN); never 0, which stands for "no value".
__device__ __forceinline__ u32 sortable(float x) {
  const u32 bits = bit_cast<u32>(x);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ u64 sortable(double x) {
  const u64 bits = bit_cast<u64>(x);
  return bits ^ (bits >> 63 ? 0xFFFFFFFFFFFFFFFFull : 0x8000000000000000ull);
}
__device__ __forceinline__ float from_sortable(u32 bits) {
  return bit_cast<float>(bits ^ (bits >> 31 ? 0x80000000u : 0xFFFFFFFFu));
}
__device__ __forceinline__ double from_sortable(u64 bits) {
  return bit_cast<double>(bits ^ (bits >> 63 ? 0x8000000000000000ull : 0xFFFFFFFFFFFFFFFFull));
}

}  // namespace halfbyte::device
