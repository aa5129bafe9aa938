// From a range of values to the scale and zero point of integers: one function for quantization, observers,
// fake quantization and export.
#pragma once

#include <cstdint>

#include "halfbyte/format.hpp"

namespace halfbyte {

struct HALFBYTE_API QParamsConfig {
  // Bounds of the codes: q_max - q_min in [2, 255], within [-128, 255].
  int q_min = -128, q_max = 127;
  // With a zero point in [q_min, q_max], of the range extended to contain 0. Else the zero point is 0, which
  // needs q_max > 0; of unsigned codes (q_min >= 0) it is (q_min + q_max + 1) / 2, the middle, as PyTorch has
  // it.
  bool asymmetric = false;
  // Symmetric: absmax: absmax / (q_max - zero point), or half_range: absmax / ((q_max - q_min) / 2).
  // Asymmetric: minmax: (max - min) / (q_max - q_min).
  ScaleRule scale_rule = ScaleRule::absmax;
  // No scale is less; 0: only 0 gives 0, and any other range at least the smallest subnormal. PyTorch's
  // observers have 2^-23.
  double eps = 0;

  // All codes of two's complement; bits in [2, 8], else Error(usage). Asymmetric with rule minmax.
  static QParamsConfig of_bits(int bits, bool asymmetric = false);

  bool operator==(const QParamsConfig&) const = default;
};
// Throws Error(usage) naming the field, the rule and the value.
HALFBYTE_API void check_config(const QParamsConfig& config);

struct QParams {
  double scale = 0;  // a value of scale_dtype
  int32_t zero_point = 0;
  bool operator==(const QParams&) const = default;
};
// min and max, values of `dtype` (f32 or f64) or rounded to it, give a scale that is computed in `dtype` and
// rounded to scale_dtype (f32, f16, bf16; f64 for f64); the zero point is that of the rounded scale. What
// quantization with computed scales, observers and fake quantization do, to the bit. Throws Error(usage) for
// a bad configuration, Error(bad_input) where min or max is not finite, min > max, or scale_dtype cannot hold
// the scale.
HALFBYTE_API QParams compute_qparams(double min, double max, const QParamsConfig& config,
                                     DType scale_dtype = DType::f32, DType dtype = DType::f32);

}  // namespace halfbyte
