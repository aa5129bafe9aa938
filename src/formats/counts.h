// What kernels find in the data while they run, and ranges as integers that atomics can join.
#pragma once

#include "formats/common.h"

namespace halfbyte {

// What a kernel finds in the data; all 0 before. The key of the first non-finite element is ~index, so that
// the largest is the first and 0 is none.
struct QuantizeCounts {
  formats::u64 num_nonfinite, first_nonfinite_key, num_unheld_scales, num_coarse_scales;
  formats::u64 num_invalid_scales, num_invalid_zero_points;
};

// What sets a workspace to 0.
struct ClearArgs {
  formats::u32* words;
  formats::i64 num_words;
};
inline constexpr int kClearThreads = 256;

// The range of finite values: order_key(-min), order_key(max); 0 where there is none.
struct RangeKeys {
  formats::u64 low, high;
};
// An integer, never 0, that orders like x (not NaN), and back.
HALFBYTE_FN formats::u64 order_key(double x) {
  const auto bits = formats::bit_cast<formats::u64>(x);
  return bits ^ (bits >> 63 != 0 ? ~0ull : 1ull << 63);
}
HALFBYTE_FN double from_order_key(formats::u64 key) {
  return formats::bit_cast<double>(key ^ (key >> 63 != 0 ? 1ull << 63 : ~0ull));
}
// The largest magnitude in a range; 0 where there is none.
HALFBYTE_FN double absmax_of(const RangeKeys& keys) {
  return keys.high == 0 ? 0 : formats::max(from_order_key(keys.low), from_order_key(keys.high));
}

}  // namespace halfbyte
