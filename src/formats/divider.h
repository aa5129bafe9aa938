// Division by a number that is known before: a multiplication and a shift.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

// n / divisor for 0 <= n < 2^31. Granlund and Montgomery, Division by Invariant Integers using Multiplication
// (1994), figure 4.1: with 2^shift the least power of two not below the divisor, multiplier = 2^32 (2^shift -
// d) / d + 1.
struct Divider {
  u32 divisor = 1, multiplier = 1, shift = 0;

  static HALFBYTE_FN Divider of(i64 divisor) {
    if (divisor >= i64{1} << 31) return {1u << 31, 0, 31};  // more than any n
    u32 shift = 0;
    while ((i64{1} << shift) < divisor) ++shift;
    const u64 d = static_cast<u64>(divisor);
    return {static_cast<u32>(d), static_cast<u32>((((1ull << shift) - d) << 32) / d + 1), shift};
  }
  HALFBYTE_FN u32 divide(u32 n) const {
    return (static_cast<u32>((static_cast<u64>(n) * multiplier) >> 32) + n) >> shift;
  }
};

}  // namespace halfbyte::formats
