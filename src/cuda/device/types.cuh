// The element types of tensors in device code: how they lie in memory, what they are computed in.
#pragma once

#include "formats/convert.h"

namespace halfbyte::device {

using namespace formats;

struct F32 {
  using Memory = float;
  using Compute = float;
  static constexpr ScaleType kScaleType = ScaleType::f32;  // of scales of this type
};
struct F64 {
  using Memory = double;
  using Compute = double;
  static constexpr ScaleType kScaleType = ScaleType::f64;
};
struct F16 {
  using Memory = u16;
  using Compute = float;
  static constexpr ScaleType kScaleType = ScaleType::f16;
};
struct BF16 {
  using Memory = u16;
  using Compute = float;
  static constexpr ScaleType kScaleType = ScaleType::bf16;
};

template <bool condition, class A, class B>
struct SelectType {
  using Type = A;
};
template <class A, class B>
struct SelectType<false, A, B> {
  using Type = B;
};
template <bool condition, class A, class B>
using Select = typename SelectType<condition, A, B>::Type;

// One element. The conversions are exact; NaN stays NaN.
__device__ __forceinline__ float load(F32, float x) { return x; }
__device__ __forceinline__ double load(F64, double x) { return x; }
__device__ __forceinline__ float load(BF16, u16 x) { return bf16_to_f32(x); }
__device__ __forceinline__ float load(F16, u16 x) { return f16_to_f32(x); }

// Rounded half to even. A NaN becomes the NaN of the device.
__device__ __forceinline__ float store(F32, float x) { return x; }
__device__ __forceinline__ double store(F64, double x) { return x; }
__device__ __forceinline__ u16 store(F16, float x) { return f32_to_f16(x); }
__device__ __forceinline__ u16 store(BF16, float x) { return f32_to_bf16(x); }

// Two elements of 16 bits in a word, the first in the low half.
__device__ __forceinline__ u32 store_pair(F16, float first, float second) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
#else
  return store(F16(), first) | static_cast<u32>(store(F16(), second)) << 16;
#endif
}
__device__ __forceinline__ u32 store_pair(BF16, float first, float second) {
#if __CUDA_ARCH__ >= 800
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
#else
  return f32_to_bf16(first) | static_cast<u32>(f32_to_bf16(second)) << 16;
#endif
}

}  // namespace halfbyte::device
