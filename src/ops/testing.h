// For the tests of the ops: random data, all SIMD targets, an oracle.
#pragma once

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/format.h"
#include "formats/bits.h"
#include "formats/scale_search.h"
#include "halfbyte/ops.hpp"

namespace halfbyte::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // run fewer of the same cases
#else
inline constexpr bool kSanitized = false;
#endif

// Runs body(name) with each SIMD target that this machine has, the scalar one included.
template <class Body>
void for_each_target(const Body& body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SCOPED_TRACE(hwy::TargetName(target));
    body(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

inline constexpr DType kFloatDTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

// Of a part of a quantized weight in host memory.
inline std::vector<uint8_t> bytes_of(const Tensor& part) {
  const auto* const data = reinterpret_cast<const uint8_t*>(part.data());
  return {data, data + part.num_bytes()};
}

// A spec, and how its codes are chosen.
struct EncodedSpec : QuantSpec {
  Encoding encoding;
  EncodedSpec(const QuantSpec& spec = {}, const Encoding& how = {}) : QuantSpec(spec), encoding(how) {}
};

// Of a format whose scales have a type of their own: that, and its groups.
inline void fit_format(QuantSpec& spec) {
  if (!info(spec.format).scale_dtype) return;
  spec.scale_dtype = *info(spec.format).scale_dtype;
  spec.granularity = Granularity::group;
  spec.group_size = info(spec.format).group_size;
  spec.double_quant = false;
}

// Every format with every way to choose its scale.
inline std::vector<EncodedSpec> all_specs() {
  std::vector<EncodedSpec> specs;
  for (const FormatInfo& format : all_formats()) {
    EncodedSpec spec;
    spec.format = format.format;
    fit_format(spec);
    if (format.format == Format::lut4)
      spec.table = {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (const bool asymmetric : {false, true}) {
      if (asymmetric && format.kind != FormatKind::integer) continue;
      spec.asymmetric = asymmetric;
      for (const ScaleRule rule : {ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max,
                                   ScaleRule::minmax, ScaleRule::mlx_edge}) {
        spec.encoding.scale_rule = rule;
        try {
          check_encoding(spec, spec.encoding);
        } catch (const Error&) {
          continue;
        }
        specs.push_back(spec);
      }
    }
  }
  return specs;
}

// Those whose scales can be searched, searching.
inline std::vector<EncodedSpec> searched_specs() {
  std::vector<EncodedSpec> specs = all_specs();
  std::erase_if(specs,
                [](const EncodedSpec& spec) { return info(spec.format).kind == FormatKind::floating; });
  for (EncodedSpec& spec : specs) spec.encoding.search = true;
  return specs;
}

// With floating scales.
inline std::vector<Format> table_formats() {
  std::vector<Format> tables;
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::table && !format.scale_dtype) tables.push_back(format.format);
  return tables;
}

inline std::string describe(const EncodedSpec& spec) {
  return fmt::format("{}{} {} {} {} {} scales", info(spec.format).name, spec.asymmetric ? " asymmetric" : "",
                     to_string(spec.encoding.scale_rule.value_or(default_scale_rule(spec))),
                     to_string(spec.granularity), spec.group_size, to_string(spec.scale_dtype));
}

// Row-major values with a dtype: kept as doubles that the dtype holds exactly, and as its bytes.
struct Values {
  DType dtype = DType::f32;
  std::vector<double> exact;
  std::vector<uint8_t> bytes;

  void push_back(double value) {
    uint8_t buffer[8];
    switch (dtype) {
      case DType::f32: {
        const auto v = static_cast<float>(value);
        std::memcpy(buffer, &v, 4);
        exact.push_back(static_cast<double>(v));
        break;
      }
      case DType::f16: {
        const uint16_t v = formats::to_f16(value);
        std::memcpy(buffer, &v, 2);
        exact.push_back(static_cast<double>(formats::f16_to_f32(v)));
        break;
      }
      case DType::bf16: {
        const uint16_t v = formats::to_bf16(value);
        std::memcpy(buffer, &v, 2);
        exact.push_back(static_cast<double>(formats::bf16_to_f32(v)));
        break;
      }
      default:
        std::memcpy(buffer, &value, 8);
        exact.push_back(value);
        break;
    }
    bytes.insert(bytes.end(), buffer, buffer + size_of(dtype));
  }
  TensorView view(std::vector<int64_t> shape) { return {bytes.data(), dtype, std::move(shape), {}, {}}; }
};

// Random values: mostly normal, with runs of what goes wrong elsewhere (zeros, constants, outliers, tiny and
// huge magnitudes, short mantissas that make ties).
inline Values random_values(DType dtype, int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 0.02);
  Values values;
  values.dtype = dtype;
  const double largest = dtype == DType::f16 ? 60000 : dtype == DType::f64 ? 1e300 : 3e38;
  const double smallest = dtype == DType::f16 ? 6e-8 : dtype == DType::f64 ? 1e-310 : 1e-44;
  while (static_cast<int64_t>(values.exact.size()) < n) {
    const auto kind = random() % 12;
    const auto length = static_cast<int64_t>(1 + random() % 80);
    const double constant = normal(random);
    for (int64_t i = 0; i < length && static_cast<int64_t>(values.exact.size()) < n; ++i) {
      double v = normal(random);
      switch (kind) {
        case 0:
          v = 0.0;
          break;
        case 1:
          v = constant;
          break;
        case 2:
          v = i == length / 2 ? constant * 5000 : v;
          break;
        case 3:
          v *= smallest * 500;
          break;
        case 4:
          v = std::max(-largest, std::min(largest, v * largest * 50));
          break;
        case 5:
          v = static_cast<double>(static_cast<int>(random() % 33) - 16) / 2;
          break;
        case 6:
          v = std::fabs(v);
          break;
        case 7:
          v = -std::fabs(v);
          break;
        case 8:
          v = random() % 2 ? -0.0 : 0.0;
          break;
        default:
          break;
      }
      values.push_back(v);
    }
  }
  return values;
}

inline bool same_status(const QuantizeStatus& a, const QuantizeStatus& b) {
  return a.num_nonfinite == b.num_nonfinite && a.first_nonfinite == b.first_nonfinite &&
         a.num_unheld_scales == b.num_unheld_scales && a.num_coarse_scales == b.num_coarse_scales &&
         a.num_invalid_scales == b.num_invalid_scales &&
         a.num_invalid_zero_points == b.num_invalid_zero_points;
}
inline std::string text_of(const QuantizeStatus& s) {
  return fmt::format("nonfinite {} first {} unheld {} coarse {} invalid scales {} invalid zeros {}",
                     s.num_nonfinite, s.first_nonfinite, s.num_unheld_scales, s.num_coarse_scales,
                     s.num_invalid_scales, s.num_invalid_zero_points);
}

// A quantized matrix with guard bytes behind every part.
struct Parts {
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr size_t kGuard = 64;
  EncodedSpec spec;
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> codes, scales, zeros, biases, global_scale;
  QuantizeStatus status;

  Parts(const EncodedSpec& s, int64_t r, int64_t c) : spec(s), rows(r), cols(c) {
    const QuantShape shape = quant_shape(s, r, c);
    const auto groups = static_cast<size_t>(shape.num_groups);
    const size_t scale_bytes = groups * static_cast<size_t>(size_of(s.scale_dtype));
    codes.assign(static_cast<size_t>(shape.code_bytes()) + kGuard, kPoison);
    scales.assign(scale_bytes + kGuard, kPoison);
    zeros.assign((has_zeros(s) ? groups : 0) + kGuard, kPoison);
    biases.assign((has_biases(s) ? scale_bytes : 0) + kGuard, kPoison);
    global_scale.assign((has_global_scale(s) ? sizeof(float) : 0) + kGuard, kPoison);
  }
  QuantizedView view() {
    return {spec,
            rows,
            cols,
            codes.data(),
            scales.data(),
            has_zeros(spec) ? zeros.data() : nullptr,
            has_biases(spec) ? biases.data() : nullptr,
            has_global_scale(spec) ? reinterpret_cast<float*>(global_scale.data()) : nullptr};
  }
  bool guards_intact() const {
    for (const auto* part : {&codes, &scales, &zeros, &biases, &global_scale})
      for (size_t i = part->size() - kGuard; i < part->size(); ++i)
        if ((*part)[i] != kPoison) return false;
    return true;
  }
  bool same_bytes(const Parts& other) const {
    return codes == other.codes && scales == other.scales && zeros == other.zeros && biases == other.biases &&
           global_scale == other.global_scale;
  }
};

// The contract in plain loops, one element at a time, sharing only src/formats with the product.
template <class F>
void oracle_quantize(const Values& x, Parts& out, const ValueRange* given, const Importance& importance) {
  const QuantShape shape = quant_shape(out.spec, out.rows, out.cols);
  formats::Codec codec = make_codec(out.spec, out.spec.encoding);
  std::fill(out.codes.begin(), out.codes.end() - Parts::kGuard, uint8_t{0});
  const bool one = out.spec.granularity == Granularity::tensor;
  const auto range_of = [&](int64_t begin, int64_t end) {
    F low = std::numeric_limits<F>::infinity(), high = -low;
    for (int64_t i = begin; i < end; ++i) {
      const auto v = static_cast<F>(x.exact[static_cast<size_t>(i)]);
      if (!std::isfinite(v)) continue;
      low = std::min(low, v);
      high = std::max(high, v);
    }
    return std::pair(low, high);
  };
  if (has_global_scale(out.spec)) {
    auto range = range_of(0, out.rows * out.cols);
    if (given) range = {static_cast<F>(given->min), static_cast<F>(given->max)};
    const F absmax = range.first > range.second ? 0 : std::max(-range.first, range.second);
    codec.global_scale = absmax == 0 ? 1 : static_cast<float>(std::clamp<F>(2688 / absmax, FLT_MIN, FLT_MAX));
    std::memcpy(out.global_scale.data(), &codec.global_scale, sizeof(float));
  }
  const auto store = [&](int64_t index, const formats::GroupParams<F>& params) {
    out.status.num_unheld_scales += params.held ? 0 : 1;
    out.status.num_coarse_scales += params.coarse ? 1 : 0;
    formats::store_scale(out.scales.data(), index, params.scale, codec.scale_type, codec.global_scale);
    if (has_zeros(out.spec))
      out.zeros[static_cast<size_t>(index)] = static_cast<uint8_t>(params.zero_point - codec.q_min);
    if (has_biases(out.spec)) formats::store_scale(out.biases.data(), index, params.bias, codec.scale_type);
  };
  formats::GroupParams<F> params;
  if (one) {
    auto range = range_of(0, out.rows * out.cols);
    if (given) range = {static_cast<F>(given->min), static_cast<F>(given->max)};
    params = formats::group_params(range.first, range.second, codec);
    store(0, params);
  }
  for (int64_t row = 0; row < shape.rows; ++row) {
    uint8_t* codes = out.codes.data() + row * shape.row_bytes;
    for (int64_t column = 0; column < shape.cols; ++column) {
      const int64_t index = row * shape.cols + column;
      if (!one && column % shape.group_size == 0) {
        const int64_t n = std::min(shape.group_size, shape.cols - column);
        const auto range = range_of(index, index + n);
        params = formats::group_params(range.first, range.second, codec);
        if (out.spec.encoding.search)
          params = formats::search_params(
              n, [&](int64_t i) { return static_cast<F>(x.exact[static_cast<size_t>(index + i)]); },
              [&](int64_t i) {
                if (importance.weights == nullptr) return 1.0f;
                return importance.weights[(importance.first + index + i) % importance.count];
              },
              range.first, range.second, codec);
        store(row * shape.groups_per_row + column / shape.group_size, params);
      }
      const auto v = static_cast<F>(x.exact[static_cast<size_t>(index)]);
      if (!std::isfinite(v) && out.status.num_nonfinite++ == 0) out.status.first_nonfinite = index;
      formats::put_code(
          codes, column, codec.bits,
          std::isfinite(v) ? formats::encode(v, params, codec) : formats::zero_code(params, codec));
    }
    // Padding: whole or cut codes of zero up to the last bit of the row.
    for (int64_t bit = shape.cols * codec.bits; bit < shape.row_bytes * 8; ++bit)
      codes[bit / 8] = static_cast<uint8_t>(
          codes[bit / 8] | ((formats::zero_code(params, codec) >> (bit % codec.bits)) & 1) << (bit % 8));
  }
}

inline Parts oracle_quantize(const Values& x, const EncodedSpec& spec, int64_t rows, int64_t cols,
                             const ValueRange* given = nullptr, const Importance& importance = {}) {
  Parts parts(spec, rows, cols);
  if (x.dtype == DType::f64)
    oracle_quantize<double>(x, parts, given, importance);
  else
    oracle_quantize<float>(x, parts, given, importance);
  return parts;
}

inline Parts quantize_parts(Values& x, const EncodedSpec& spec, int64_t rows, int64_t cols,
                            int num_threads = 1, const ValueRange* given = nullptr,
                            const Importance& importance = {}) {
  Parts parts(spec, rows, cols);
  parts.status =
      quantize(x.view({rows, cols}), parts.view(), spec.encoding, {num_threads}, given, importance);
  return parts;
}

}  // namespace halfbyte::testing
