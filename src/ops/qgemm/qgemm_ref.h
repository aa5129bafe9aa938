// The scalar reference of `qgemm`: sums in f64 over weights that are rounded as a class of rounding says, and
// how far from them a result may be.
#pragma once

#include <cmath>
#include <vector>

#include "ops/qgemm/weight/int8.h"
#include "ops/qgemm/weight/weight.h"

namespace halfbyte {

// x rounded to a 16-bit type; f32: as it is, products are of f32.
inline double round_to(double x, DType dtype) {
  if (dtype == DType::bf16) return static_cast<double>(formats::bf16_to_f32(formats::to_bf16(x)));
  if (dtype == DType::f16) return static_cast<double>(formats::f16_to_f32(formats::to_f16(x)));
  return x;
}

// A weight, and the magnitude that the error of its products is measured by: that of the weight, or of its
// parts where they are summed apart.
struct ReferenceWeight {
  double value = 0, magnitude = 0;
};
inline ReferenceWeight reference_weight(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row,
                                        int64_t col, WeightRounding rounding) {
  const formats::Codec& codec = problem.codec;
  const int code = load_code(problem, tensors, row, col);
  auto [scale, bias, zero_point] = load_group<double>(problem, tensors, row, col);
  double value = code;
  const bool int8 = problem.math == QgemmMath::int8;
  if (codec.kind == formats::Kind::table) value = static_cast<double>(codec.book.values[code]);
  if (codec.kind == formats::Kind::table && int8) {
    const Int8Table table = int8_table(codec);
    value = table.values[static_cast<size_t>(code)] * static_cast<double>(table.unit);
  }
  if (codec.kind == formats::Kind::integer) value = code + codec.q_min - zero_point;
  if (codec.kind == formats::Kind::floating)
    value = static_cast<double>(formats::e4m3_to_f32(static_cast<uint8_t>(code)));
  if (rounding == WeightRounding::weight_rounded) {
    const auto rounded = [&](double x) { return round_to(x, problem.dtype); };
    // A global scale is applied to sums.
    const double global = load_global_scale(problem, tensors);
    const double weight = rounded(rounded(value) * rounded(scale * global) + rounded(bias)) / global;
    return {weight, std::fabs(weight)};
  }
  if (rounding == WeightRounding::code_rounded && !int8) value = round_to(value, problem.dtype);
  double magnitude = std::fabs(value * scale) + std::fabs(bias);
  if (rounding == WeightRounding::code_rounded && codec.asymmetric)
    magnitude = (code + std::abs(zero_point - codec.q_min)) * std::fabs(scale);
  return {value * scale + bias, magnitude};
}

// Half of the distance of neighbours of `dtype` around a value.
inline double half_ulp(double value, DType dtype) {
  const int digits = dtype == DType::bf16 ? 8 : dtype == DType::f16 ? 11 : 24;
  const int lowest = dtype == DType::f16 ? -14 : -126;  // exponent of normal values
  const int exponent = value == 0 ? lowest : std::max(lowest, std::ilogb(value));
  return std::ldexp(1.0, exponent - digits);
}

// x as products multiply it, [m, in_cols].
inline std::vector<double> reference_x(const QgemmProblem& problem, const void* x) {
  const int64_t cols = problem.in_cols();
  std::vector<double> values;
  for (int64_t i = 0; i < problem.m * cols; ++i) values.push_back(load_element<double>(x, i, problem.dtype));
  if (problem.math != QgemmMath::int8) return values;
  for (int64_t row = 0; row < problem.m; ++row)
    for (int64_t begin = 0; begin < cols; begin += formats::kUnitCols) {
      double* const unit = values.data() + row * cols + begin;
      const int64_t n = std::min<int64_t>(cols - begin, formats::kUnitCols);
      double most = 0;
      for (int64_t i = 0; i < n; ++i) most = std::fmax(most, std::fabs(unit[i]));
      const auto [scale, reciprocal] = int8_scale(static_cast<float>(most));
      for (int64_t i = 0; i < n; ++i)
        unit[i] = static_cast<double>(std::nearbyint(static_cast<float>(unit[i]) * reciprocal)) *
                  static_cast<double>(scale);
    }
  return values;
}

struct QgemmReference {
  std::vector<double> y, bound;  // |result - y| <= bound
  std::vector<double> error;     // the bound without the rounding to the dtype of y
};
// tensors.y: as it was before, of which `accumulate` makes use. All in host memory.
inline QgemmReference qgemm_ref(const QgemmProblem& problem, const QgemmTensors& tensors,
                                WeightRounding rounding) {
  const int64_t num_in = problem.in_cols(), num_out = problem.out_cols();
  const std::vector<double> x = reference_x(problem, tensors.x);
  std::vector<double> values, magnitudes;  // of weights as they are summed: [num_out, num_in]
  for (int64_t j = 0; j < num_out; ++j)
    for (int64_t l = 0; l < num_in; ++l) {
      const auto weight = problem.transposed ? reference_weight(problem, tensors, l, j, rounding)
                                             : reference_weight(problem, tensors, j, l, rounding);
      values.push_back(weight.value);
      magnitudes.push_back(weight.magnitude);
    }
  // Each term brings two roundings, and so does a global scale; tf32 rounds both factors.
  const bool has_global_scale = problem.codec.scale_type == formats::ScaleType::e4m3;
  const auto terms = static_cast<double>(num_in + problem.bias + problem.accumulate + has_global_scale);
  const double tf32 = problem.math == QgemmMath::tf32 ? 0x1.01p-10 : 0;
  QgemmReference result;
  for (int64_t i = 0; i < problem.m; ++i)
    for (int64_t j = 0; j < num_out; ++j) {
      double sum = 0, magnitude = 0, products = 0;
      const auto add = [&](const void* data, int64_t index) {
        const auto value = load_element<double>(data, index, problem.dtype);
        sum += value;
        magnitude += std::fabs(value);
      };
      if (problem.bias) add(tensors.bias, j);
      if (problem.accumulate) add(tensors.y, i * num_out + j);
      const double *const a = x.data() + i * num_in, *const w = values.data() + j * num_in;
      const double* const w_magnitude = magnitudes.data() + j * num_in;
      for (int64_t l = 0; l < num_in; ++l) {
        sum += a[l] * w[l];
        products += std::fabs(a[l]) * w_magnitude[l];
      }
      const double error = 2 * terms * 0x1p-24 * (magnitude + products) + tf32 * products;
      result.y.push_back(sum);
      result.error.push_back(error);
      result.bound.push_back(error + half_ulp(std::fabs(sum) + error, problem.dtype));
    }
  return result;
}

}  // namespace halfbyte
