// Computes the scale and zero point of integer codes from a range of values. Quantization, observers, fake
// quantization and export all use this one function.
#pragma once

#include <cstdint>

#include "halfbyte/format.hpp"

namespace halfbyte {

struct HALFBYTE_API QParamsConfig {
  // Bounds of the codes: q_max - q_min in [2, 255], within [-128, 255].
  int q_min = -128, q_max = 127;
  // true: with a zero point in [q_min, q_max], for the range extended to contain 0. false: the zero point is
  // 0, which needs q_max > 0; for unsigned codes (q_min >= 0) it is the middle, (q_min + q_max + 1) / 2, as
  // in PyTorch.
  bool asymmetric = false;
  // Symmetric: absmax: absmax / (q_max - zero point), or half_range: absmax / ((q_max - q_min) / 2).
  // Asymmetric: minmax: (max - min) / (q_max - q_min).
  ScaleRule scale_rule = ScaleRule::absmax;
  // The least scale. With 0, only an all-zero range gives scale 0; any other gives at least the smallest
  // subnormal. PyTorch's observers use 2^-23.
  double eps = 0;

  // All two's complement codes of `bits` bits; bits must be in [2, 8], else Error(usage). Asymmetric uses
  // rule minmax.
  static QParamsConfig of_bits(int bits, bool asymmetric = false);
  int num_levels() const { return q_max - q_min + 1; }  // codes that there are

  bool operator==(const QParamsConfig&) const = default;
};
// Throws Error(usage) naming the field, the rule and the value.
HALFBYTE_API void check_config(const QParamsConfig& config);

struct QParams {
  double scale = 0;  // a value of scale_dtype
  int32_t zero_point = 0;
  bool operator==(const QParams&) const = default;
};
// min and max are rounded to `dtype` (f32 or f64). The scale is computed in `dtype` and rounded to
// scale_dtype (f32, f16, bf16; f64 for f64). The zero point is computed from the rounded scale. Quantization
// with computed scales, observers and fake quantization do exactly this, to the bit. Throws Error(usage) for
// a bad configuration, and Error(bad_input) if min or max is not finite, min > max, or scale_dtype cannot
// hold the scale.
HALFBYTE_API QParams compute_qparams(double min, double max, const QParamsConfig& config,
                                     DType scale_dtype = DType::f32, DType dtype = DType::f32);

}  // namespace halfbyte
