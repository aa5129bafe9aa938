// What the kernel of `compute_qparams` is given: shared by host and device, freestanding.
#pragma once

#include "formats/counts.h"
#include "formats/qparams.h"

namespace halfbyte {

// How zero points are stored.
enum class QParamsZero : formats::u8 { none, i32, i8, u8 };

struct ComputeQParamsArgs {
  const void *min, *max;
  void *scale, *zero_point;
  QuantizeCounts* counts;
  formats::i64 n;
  formats::i32 q_min, q_max;
  double eps;
  formats::Rule rule;
  formats::ScaleType scale_type;
  QParamsZero zero_type;
};

// Of the range of an observer. None (min > max, or not finite): scale 0 and the zero point of 0.
template <class F>
HALFBYTE_FN formats::GroupParams<F> observed_qparams(F min, F max, const formats::QParamsRule& rule,
                                                     bool& valid) {
  valid = min <= max && formats::is_finite(min) && formats::is_finite(max);
  if (!valid) min = max = 0;
  formats::GroupParams<F> params = formats::qparams(min, max, rule);
  if (!valid) params.scale = 0;
  return params;
}

// Element `index` of the zero points.
HALFBYTE_FN void store_zero_point(void* zero_points, QParamsZero type, formats::i64 index,
                                  formats::i32 value) {
  switch (type) {
    case QParamsZero::i32:
      static_cast<formats::i32*>(zero_points)[index] = value;
      break;
    case QParamsZero::i8:
    case QParamsZero::u8:
      static_cast<formats::u8*>(zero_points)[index] = static_cast<formats::u8>(value);
      break;
    case QParamsZero::none:
      break;
  }
}

}  // namespace halfbyte
