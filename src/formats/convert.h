// Conversions between f32, f64 and the 16-bit floating types, round half to even, one rounding. A device does
// them with an instruction: a NaN then loses its payload.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

HALFBYTE_FN float bf16_to_f32(u16 bits) { return bit_cast<float>(static_cast<u32>(bits) << 16); }

HALFBYTE_FN u16 f32_to_bf16(float x) {
#if HALFBYTE_DEVICE_ARCH >= 800
  if (!__builtin_is_constant_evaluated()) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
#endif
  const u32 bits = bit_cast<u32>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<u16>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<u16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

HALFBYTE_FN float f16_to_f32(u16 bits) {
#if HALFBYTE_DEVICE_ARCH > 0
  if (!__builtin_is_constant_evaluated()) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
  }
#endif
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u)  // Inf, NaN
    return bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude < 0x400u) {  // zero, subnormal: exact in f32
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -value : value;
  }
  return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

HALFBYTE_FN u16 f32_to_f16(float x) {
#if HALFBYTE_DEVICE_ARCH > 0
  if (!__builtin_is_constant_evaluated()) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
#endif
  const u32 bits = bit_cast<u32>(x);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u)
    return static_cast<u16>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));  // quiet NaN
  if (magnitude >= 0x477FF000u) return static_cast<u16>(sign | 0x7C00u);     // 65520 and above: Inf
  if (magnitude < 0x38800000u) {                                             // below 2^-14: subnormal
    // Adding 1/2 makes the unit in the last place 2^-24, the step of the subnormals.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<u16>(sign | (bit_cast<u32>(shifted) - 0x3F000000u));
  }
  const u32 rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<u16>(sign | ((rounded - 0x38000000u) >> 13));
}

// f64 -> f32 rounded to odd: a second rounding to 16 bits is then the rounding of the f64.
HALFBYTE_FN float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (!is_finite(nearest) || static_cast<double>(nearest) == x) return nearest;
  u32 bits = bit_cast<u32>(nearest);
  if (bits & 1u) return nearest;
  const bool too_large = abs(static_cast<double>(nearest)) > abs(x);
  bits = too_large ? bits - 1 : bits + 1;
  return bit_cast<float>(bits);
}

HALFBYTE_FN u16 to_bf16(float x) { return f32_to_bf16(x); }
HALFBYTE_FN u16 to_bf16(double x) { return f32_to_bf16(round_to_odd(x)); }
HALFBYTE_FN u16 to_f16(float x) { return f32_to_f16(x); }
HALFBYTE_FN u16 to_f16(double x) { return f32_to_f16(round_to_odd(x)); }

// E4M3 without infinity (OCP 8-bit floating point 1.0): bias 7, largest 448 (0x7E), NaN 0x7F, subnormals in
// steps of 2^-9. What rounds to more than 448 is NaN.
inline constexpr u8 kLargestE4m3 = 0x7E;
inline constexpr float kMaxE4m3 = 448;
HALFBYTE_FN float e4m3_to_f32(u8 bits) {
  const u32 magnitude = bits & 0x7Fu;
  const u32 sign = (bits & 0x80u) << 24;
  if (magnitude == 0x7F) return bit_cast<float>(sign | 0x7FC00000u);
  if (magnitude < 8) {
    const float value = static_cast<float>(magnitude) * 0.001953125f;  // 2^-9
    return bit_cast<float>(sign | bit_cast<u32>(value));
  }
  return bit_cast<float>(sign | ((magnitude << 20) + 0x3C000000u));
}
HALFBYTE_FN u8 f32_to_e4m3(float x) {
  const u32 bits = bit_cast<u32>(x);
  const u32 sign = (bits >> 24) & 0x80u;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x43E80000u) return static_cast<u8>(sign | 0x7Fu);  // above 464, NaN
  if (magnitude < 0x3C800000u) {                                      // below 2^-6: subnormal
    // Adding 2^14 makes the unit in the last place 2^-9, the step of the subnormals.
    const float shifted = bit_cast<float>(magnitude) + 16384.0f;
    return static_cast<u8>(sign | (bit_cast<u32>(shifted) - 0x46800000u));
  }
  const u32 rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<u8>(sign | ((rounded - 0x3C000000u) >> 20));
}
HALFBYTE_FN u8 to_e4m3(float x) { return f32_to_e4m3(x); }
HALFBYTE_FN u8 to_e4m3(double x) { return f32_to_e4m3(round_to_odd(x)); }

// E8M0 (OCP Microscaling Formats 1.0): 2^(bits - 127), NaN 0xFF.
HALFBYTE_FN float e8m0_to_f32(u8 bits) {
  if (bits == 0xFF) return bit_cast<float>(0x7FC00000u);
  return bit_cast<float>(bits == 0 ? 0x00400000u : static_cast<u32>(bits) << 23);
}
// The power of two for x >= 0: a mantissa below 1.75 is dropped, others are rounded up, as compressed-tensors
// does. What is less than 2^-127 gives that, what is too large NaN.
HALFBYTE_FN u8 f32_to_e8m0(float x) {
  const u32 bits = bit_cast<u32>(x);
  if (bits < 0x00400000u) return 0;
  // In subnormals, which 2^-127 is one of, the leading bit is that of 1/2: 1.75 is 0x700000.
  if (bits < 0x00800000u) return bits < 0x00700000u ? 0 : 1;
  const u32 exponent = (bits + 0x00200000u) >> 23;
  return static_cast<u8>(min(exponent, 0xFFu));
}
HALFBYTE_FN u8 to_e8m0(float x) { return f32_to_e8m0(x); }
HALFBYTE_FN u8 to_e8m0(double x) { return f32_to_e8m0(round_to_odd(x)); }

// The types a scale or bias can be stored in.
enum class ScaleType : u8 { f32, f16, bf16, f64, e4m3, e8m0 };

// x after being stored as `type` and loaded again. What is stored as e4m3 is multiplied by the global scale
// before, and divided by it when it is loaded.
template <class F>
HALFBYTE_FN F stored(F x, ScaleType type, float global_scale = 1) {
  switch (type) {
    case ScaleType::e4m3:
      return static_cast<F>(e4m3_to_f32(to_e4m3(x * static_cast<F>(global_scale)))) /
             static_cast<F>(global_scale);
    case ScaleType::e8m0:
      return static_cast<F>(e8m0_to_f32(to_e8m0(x)));
    case ScaleType::f16:
      return static_cast<F>(f16_to_f32(to_f16(x)));
    case ScaleType::bf16:
      return static_cast<F>(bf16_to_f32(to_bf16(x)));
    case ScaleType::f32:
      return static_cast<F>(static_cast<float>(x));
    case ScaleType::f64:
      break;
  }
  return x;
}

HALFBYTE_FN int scale_bytes(ScaleType type) {
  switch (type) {
    case ScaleType::f64:
      return 8;
    case ScaleType::f32:
      return 4;
    case ScaleType::f16:
    case ScaleType::bf16:
      return 2;
    case ScaleType::e4m3:
    case ScaleType::e8m0:
      break;
  }
  return 1;
}

// Element `index` of an array of scales. `value` must be representable (see `stored`).
template <class F>
HALFBYTE_FN void store_scale(void* scales, i64 index, F value, ScaleType type, float global_scale = 1) {
  switch (type) {
    case ScaleType::e4m3:  // the quotient by the global scale is so near that the product finds its e4m3
      static_cast<u8*>(scales)[index] = to_e4m3(value * static_cast<F>(global_scale));
      break;
    case ScaleType::e8m0:
      static_cast<u8*>(scales)[index] = to_e8m0(value);
      break;
    case ScaleType::f32:
      static_cast<float*>(scales)[index] = static_cast<float>(value);
      break;
    case ScaleType::f16:
      static_cast<u16*>(scales)[index] = to_f16(value);
      break;
    case ScaleType::bf16:
      static_cast<u16*>(scales)[index] = to_bf16(value);
      break;
    case ScaleType::f64:
      static_cast<double*>(scales)[index] = static_cast<double>(value);
      break;
  }
}
template <class F>
HALFBYTE_FN F load_scale(const void* scales, i64 index, ScaleType type, float global_scale = 1) {
  switch (type) {
    case ScaleType::e4m3:
      return static_cast<F>(e4m3_to_f32(static_cast<const u8*>(scales)[index])) /
             static_cast<F>(global_scale);
    case ScaleType::e8m0:
      return static_cast<F>(e8m0_to_f32(static_cast<const u8*>(scales)[index]));
    case ScaleType::f16:
      return static_cast<F>(f16_to_f32(static_cast<const u16*>(scales)[index]));
    case ScaleType::bf16:
      return static_cast<F>(bf16_to_f32(static_cast<const u16*>(scales)[index]));
    case ScaleType::f32:
      return static_cast<F>(static_cast<const float*>(scales)[index]);
    case ScaleType::f64:
      break;
  }
  return static_cast<F>(static_cast<const double*>(scales)[index]);
}

}  // namespace halfbyte::formats
