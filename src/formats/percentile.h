// Percentiles as order statistics: nearest rank.
#pragma once

#include "formats/common.h"

namespace halfbyte::formats {

// Of n > 0 values sorted up, v[0] .. v[n-1], the percentile is v[k - 1] with k the result: p * n / 100 in
// f64 (the product rounded, then the quotient), rounded up, in (n / 2, n]. That of the other end, (100 - p),
// is v[n - k], so that a range is as wide on both sides. k is more than n / 2, so that the ends do not cross:
// the narrowest range is the median, or both of them.
HALFBYTE_FN i64 percentile_rank(double percentile, i64 n) {
  const double exact = percentile * static_cast<double>(n) / 100;
  const i64 whole = static_cast<i64>(exact);
  return max(n / 2 + 1, min(n, static_cast<double>(whole) < exact ? whole + 1 : whole));
}

// An unsigned integer that orders like x, which is finite; -0 is +0. And back.
template <class F>
HALFBYTE_FN typename Float<F>::Bits order_bits(F x) {
  using Bits = typename Float<F>::Bits;
  const Bits bits = bit_cast<Bits>(x + 0);
  return bits ^ ((bits & Float<F>::kSign) != 0 ? static_cast<Bits>(~static_cast<Bits>(0)) : Float<F>::kSign);
}
template <class F>
HALFBYTE_FN F from_order_bits(typename Float<F>::Bits key) {
  using Bits = typename Float<F>::Bits;
  return bit_cast<F>(
      static_cast<Bits>(key ^ ((key & Float<F>::kSign) != 0 ? Float<F>::kSign : ~static_cast<Bits>(0))));
}

}  // namespace halfbyte::formats
