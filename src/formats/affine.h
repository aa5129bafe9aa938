// Affine codes with a choice of rounding, and parameters that are refitted to codes.
#pragma once

#include "formats/codec.h"

namespace halfbyte::formats {

// The code of a finite x. Ties to even, or away from 0: what lies between the codes is compared with 1/2,
// since adding 1/2 would round (0.49999997 + 0.5 is 1 in f32).
HALFBYTE_FN int affine_encode(float x, const GroupParams<float>& params, const Codec& codec, bool half_away) {
  const float position = affine_position(x, params, codec);
  if (!half_away) return static_cast<int>(round_half_even(position));
  const int below = static_cast<int>(position);
  return below + (position - static_cast<float>(below) >= 0.5f ? 1 : 0);
}

// Of the finite elements w of a group and their codes q: pairwise sums in f64, and exact ones.
struct RefitSums {
  double w = 0, qw = 0;
  u64 q = 0, qq = 0, n = 0;
};

// The scale and bias that minimise the sum of (q * scale + bias - w)^2, as stored; `start` where no such are
// determined, or cannot be held.
HALFBYTE_FN GroupParams<float> refitted(const RefitSums& sums, const GroupParams<float>& start,
                                        const Codec& codec) {
  const auto n = static_cast<double>(sums.n), q = static_cast<double>(sums.q);
  const double determinant = n * static_cast<double>(sums.qq) - q * q;
  if (!(determinant > 0)) return start;
  const double scale = (n * sums.qw - q * sums.w) / determinant;
  const double bias = (sums.w - scale * q) / n;
  GroupParams<float> params = start;
  params.scale = static_cast<float>(stored_scale(scale, codec.scale_type));
  params.bias = static_cast<float>(stored(bias, codec.scale_type));
  params.coarse = is_coarse(params.scale, codec);
  params.held = is_held(params, codec);
  return params.held ? params : start;
}

// (q * scale + bias - w)^2: of y as it is decoded, in f64.
HALFBYTE_FN double squared_error(int code, float w, const GroupParams<float>& params, const Codec& codec) {
  const double error =
      static_cast<double>(decode(code, params.scale, params.bias, 0, codec)) - static_cast<double>(w);
  return error * error;
}

}  // namespace halfbyte::formats
