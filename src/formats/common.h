// What every codec header needs. The headers of this folder are freestanding: they include only each
// other, and compile under g++, clang and NVRTC. They are the only place where a code book, a rounding
// rule or a packing rule exists.
#pragma once

#ifdef __CUDACC__
#define HALFBYTE_FN __host__ __device__ constexpr
#else
#define HALFBYTE_FN constexpr
#endif

// 10 * the compute capability that device code is compiled for; 0 on the host.
#ifdef __CUDA_ARCH__
#define HALFBYTE_DEVICE_ARCH __CUDA_ARCH__
#else
#define HALFBYTE_DEVICE_ARCH 0
#endif

namespace halfbyte::formats {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// What the bulk copy engine of a device takes to walk a matrix, as the driver makes it
// (src/cuda/tensor_map.h).
struct alignas(64) TensorMap {
  u64 words[16] = {};
};

template <class To, class From>
HALFBYTE_FN To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

template <class T>
HALFBYTE_FN T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
HALFBYTE_FN T max(T a, T b) {
  return a < b ? b : a;
}
// NaN gives the lower bound.
template <class F>
HALFBYTE_FN F clamp(F x, F low, F high) {
  return min(high, max(low, x));
}
template <class F>
HALFBYTE_FN F abs(F x) {
  return x < 0 ? -x : x;
}

// The unsigned integer of the same size, and the bounds of a floating type.
template <class F>
struct Float;
template <>
struct Float<float> {
  using Bits = u32;
  static constexpr u32 kSign = 0x80000000u;
  static constexpr u32 kInfinity = 0x7F800000u;
  static constexpr float kMax = 3.4028234663852886e38f;
  static constexpr float kUnit = 8388608.0f;  // 2^23: from here on every value is an integer
};
template <>
struct Float<double> {
  using Bits = u64;
  static constexpr u64 kSign = 0x8000000000000000ull;
  static constexpr u64 kInfinity = 0x7FF0000000000000ull;
  static constexpr double kMax = 1.7976931348623157e308;
  static constexpr double kUnit = 4503599627370496.0;  // 2^52
};

template <class F>
HALFBYTE_FN bool is_finite(F x) {
  return (bit_cast<typename Float<F>::Bits>(x) & ~Float<F>::kSign) < Float<F>::kInfinity;
}

// The next value below x (x finite); -0 and +0 are one value.
template <class F>
HALFBYTE_FN F next_below(F x) {
  using Bits = typename Float<F>::Bits;
  if (x == 0) return bit_cast<F>(static_cast<Bits>(Float<F>::kSign | 1u));
  const Bits bits = bit_cast<Bits>(x);
  return bit_cast<F>(static_cast<Bits>(x > 0 ? bits - 1 : bits + 1));
}

// Round half to even: adding and taking away 2^(mantissa bits) leaves the rounding to the addition.
// Needs strict IEEE arithmetic (no fast-math).
template <class F>
HALFBYTE_FN F round_half_even(F x) {
  constexpr F kUnit = Float<F>::kUnit;
  if (!(abs(x) < kUnit)) return x;
  return x < 0 ? (x - kUnit) + kUnit : (x + kUnit) - kUnit;
}

}  // namespace halfbyte::formats
