// From a range to the scale and zero point of integers, as observers, fake quantization and quantization with
// computed scales have it.
#pragma once

#include "formats/codec.h"

namespace halfbyte::formats {

struct QParamsRule {
  Rule rule = Rule::absmax;  // absmax, half_range; asymmetric: minmax
  ScaleType scale_type = ScaleType::f32;
  bool asymmetric = false;
  i32 q_min = -128, q_max = 127;
  double eps = 0;

  // The zero point where it does not depend on the range: 0, or the middle of unsigned codes.
  HALFBYTE_FN i32 fixed_zero_point() const {
    return asymmetric || q_min < 0 ? 0 : static_cast<i32>((q_min + q_max + 1) / 2);
  }
};

// Scale and zero point; see group_params. Symmetric codes are those around the zero point.
template <class F>
HALFBYTE_FN GroupParams<F> qparams(F min, F max, const QParamsRule& rule) {
  const i32 zero_point = rule.fixed_zero_point();
  Codec codec;
  codec.kind = Kind::integer;
  codec.rule = rule.rule;
  codec.scale_type = rule.scale_type;
  codec.asymmetric = rule.asymmetric;
  codec.q_min = rule.q_min - zero_point;
  codec.q_max = rule.q_max - zero_point;
  codec.eps = rule.eps;
  GroupParams<F> params = group_params(min, max, codec);
  params.zero_point += zero_point;
  return params;
}

}  // namespace halfbyte::formats
