#include "core/qparams.h"

#include <cmath>

#include "core/expect.h"
#include "core/format.h"

namespace halfbyte {
namespace {

constexpr const char* kConfig = "qparams config";

template <class F>
QParams computed(double given_min, double given_max, const QParamsConfig& config, DType scale_dtype) {
  const auto min = static_cast<F>(given_min), max = static_cast<F>(given_max);
  const char* const dtype = sizeof(F) == 4 ? "f32" : "f64";
  HALFBYTE_CHECK(std::isfinite(min) && std::isfinite(max), bad_input,
                 "compute_qparams: min and max must be finite in {}, got {} and {}", dtype, given_min,
                 given_max);
  HALFBYTE_CHECK(min <= max, bad_input, "compute_qparams: min must be at most max, got {} and {}", min, max);
  const auto params = formats::qparams(min, max, qparams_rule(config, scale_dtype));
  HALFBYTE_CHECK(params.held, bad_input, "compute_qparams: scale_dtype {} cannot hold the scale of [{}, {}]",
                 to_string(scale_dtype), min, max);
  return {static_cast<double>(params.scale), params.zero_point};
}

}  // namespace

QParamsConfig QParamsConfig::of_bits(int bits, bool asymmetric) {
  HALFBYTE_MUST(2 <= bits && bits <= 8, invalid_problem, kConfig, "bits", "be", "in [2, 8]", bits);
  QParamsConfig config;
  config.q_min = -(1 << (bits - 1));
  config.q_max = (1 << (bits - 1)) - 1;
  config.asymmetric = asymmetric;
  if (asymmetric) config.scale_rule = ScaleRule::minmax;
  return config;
}

void check_config(const QParamsConfig& config) {
  HALFBYTE_CHECK(-128 <= config.q_min && config.q_max <= 255, usage,
                 "{}: q_min and q_max must be within [-128, 255], got {} and {}", kConfig, config.q_min,
                 config.q_max);
  HALFBYTE_CHECK(
      config.q_min <= config.q_max && 2 <= config.q_max - config.q_min && config.q_max - config.q_min <= 255,
      usage, "{}: q_max - q_min must be in [2, 255], got {} and {}", kConfig, config.q_min, config.q_max);
  HALFBYTE_CHECK(config.asymmetric || config.q_max > 0, usage,
                 "{}: symmetric codes need q_max > 0, got [{}, {}]", kConfig, config.q_min, config.q_max);
  if (config.asymmetric)
    HALFBYTE_CHECK(config.scale_rule == ScaleRule::minmax, usage,
                   "{}: scale_rule of an asymmetric configuration must be minmax, got {}", kConfig,
                   to_string(config.scale_rule));
  else
    HALFBYTE_CHECK(config.scale_rule == ScaleRule::absmax || config.scale_rule == ScaleRule::half_range,
                   usage, "{}: scale_rule of a symmetric configuration must be absmax or half-range, got {}",
                   kConfig, to_string(config.scale_rule));
  HALFBYTE_MUST(std::isfinite(static_cast<float>(config.eps)) && config.eps >= 0, invalid_problem, kConfig,
                "eps", "be", "finite in f32 and >= 0", config.eps);
}

formats::QParamsRule qparams_rule(const QParamsConfig& config, DType scale_dtype) {
  return {static_cast<formats::Rule>(config.scale_rule),
          scale_type(scale_dtype),
          config.asymmetric,
          config.q_min,
          config.q_max,
          config.eps};
}

void check_scale_dtype(const char* what, DType dtype, DType scale_dtype) {
  HALFBYTE_MUST(dtype == DType::f32 || dtype == DType::f64, unsupported, what, "dtype", "be", "f32 or f64",
                to_string(dtype));
  HALFBYTE_CHECK(is_floating(scale_dtype) && (scale_dtype != DType::f64 || dtype == DType::f64), usage,
                 "{}: scale_dtype must be f32, f16 or bf16, or f64 of f64, got {} of {}", what,
                 to_string(scale_dtype), to_string(dtype));
}

QParams compute_qparams(double min, double max, const QParamsConfig& config, DType scale_dtype, DType dtype) {
  check_config(config);
  check_scale_dtype("compute_qparams", dtype, scale_dtype);
  return dtype == DType::f64 ? computed<double>(min, max, config, scale_dtype)
                             : computed<float>(min, max, config, scale_dtype);
}

}  // namespace halfbyte
