// One-line forms: a matrix to NF4 in groups of 64 and back.
//   quantize_cpp
#include <cmath>
#include <cstdio>
#include <vector>

#include "halfbyte/ops.hpp"
#include "halfbyte/version.hpp"

int main() {
  const int64_t rows = 4, cols = 128;
  std::vector<float> weights(rows * cols), decoded(rows * cols);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = std::sin(static_cast<float>(i));

  halfbyte::TensorView x{weights.data(), halfbyte::DType::f32, {rows, cols}, {}, {}};
  const halfbyte::QuantizedTensor q = halfbyte::quantize(x, halfbyte::QuantSpec{});
  x.data = decoded.data();
  halfbyte::dequantize(q, x);

  float max_error = 0;
  for (size_t i = 0; i < weights.size(); ++i)
    max_error = std::max(max_error, std::abs(decoded[i] - weights[i]));
  std::printf("halfbyte %s: %s, %zu bytes of codes, largest error %.3f\n", halfbyte::kVersion,
              halfbyte::info(q.spec.format).name, static_cast<size_t>(q.codes.num_bytes()), max_error);
  // The widest gap of NF4 is 0.304 of the scale, which is at most 1 here.
  return max_error < 0.153f ? 0 : 1;
}
