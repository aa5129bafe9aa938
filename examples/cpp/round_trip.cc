// A flat buffer to INT4 and NF4 and back, in groups of 64: packed codes, a scale a group, and the error that
// remains.
//   round_trip_cpp
// Exit code 1: an error is not that of the format.
#include <cmath>
#include <cstdio>

#include "halfbyte/error.hpp"
#include "halfbyte/simple.hpp"
#include "random_values.h"

using namespace halfbyte;

namespace {

constexpr int64_t kCount = 100001;  // odd: the last byte holds one code; and the last group is short

// sqrt(sum (decoded - values)^2 / sum values^2), printed.
double relative_rmse(const char* name, const std::vector<float>& values, const std::vector<float>& decoded) {
  double noise = 0, signal = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = static_cast<double>(values[i]), error = static_cast<double>(decoded[i]) - value;
    noise += error * error;
    signal += value * value;
  }
  const double result = std::sqrt(noise / signal);
  std::printf("%-16s relative RMSE %.4f\n", name, result);
  return result;
}

}  // namespace

int main() try {
  const std::vector<float> values = RandomValues(1).values(kCount);
  std::vector<float> decoded(values.size());
  Int4Config config;  // groups of 64, symmetric
  const int64_t groups = config.num_groups(kCount), num_bytes = config.packed_bytes(kCount);
  std::vector<uint8_t> codes(static_cast<size_t>(num_bytes)), zeros(static_cast<size_t>(groups));
  std::vector<float> scales(static_cast<size_t>(groups));

  const ConstTensorView x{values.data(), DType::f32, {kCount}};
  const TensorView y{decoded.data(), DType::f32, {kCount}};
  const TensorView code_view{codes.data(), DType::u8, {num_bytes}},
      scale_view{scales.data(), DType::f32, {groups}};
  const TensorView zero_view{zeros.data(), DType::u8, {groups}};

  quantize_int4(x, code_view, scale_view, {}, kCount, config);
  dequantize_int4(code_view, scale_view, {}, y, kCount, config);
  const double symmetric = relative_rmse("int4", values, decoded);

  config.symmetric = false;  // with zero points
  quantize_int4(x, code_view, scale_view, zero_view, kCount, config);
  dequantize_int4(code_view, scale_view, zero_view, y, kCount, config);
  const double asymmetric = relative_rmse("int4 asymmetric", values, decoded);

  quantize_nf4(x, code_view, scale_view, kCount);
  dequantize_nf4(code_view, scale_view, y, kCount);
  const double nf4 = relative_rmse("nf4", values, decoded);

  std::printf("%lld values: %lld bytes of codes, %lld scales\n", static_cast<long long>(kCount),
              static_cast<long long>(num_bytes), static_cast<long long>(groups));
  // What these numbers give: 0.100, 0.086 and 0.091.
  return symmetric < 0.11 && asymmetric < 0.095 && nf4 < 0.095 ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
