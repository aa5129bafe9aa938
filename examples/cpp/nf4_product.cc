// A product with an NF4 weight, and the gradient of its input, for f32 and for bf16 activations, beside the
// same sums in f64 over the decoded weight.
//   nf4_product_cpp [DEVICE]      cpu (the default), cuda, cuda:1
// Exit code 1: an error exceeds its bound.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "halfbyte/device.hpp"
#include "halfbyte/qgemm.hpp"
#include "random_values.h"

using namespace halfbyte;

namespace {

constexpr int64_t kM = 5, kN = 320, kK = 640;  // y[m, n] = x[m, k] . W[n, k]^T

// f32 or bf16, to nearest even.
std::vector<uint8_t> bytes_of(const std::vector<float>& values, DType dtype) {
  const auto size = static_cast<size_t>(size_of(dtype));
  std::vector<uint8_t> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    if (dtype == DType::bf16) bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}
float value_at(const std::vector<uint8_t>& bytes, DType dtype, size_t index) {
  const auto size = static_cast<size_t>(size_of(dtype));
  uint32_t bits = 0;
  std::memcpy(&bits, bytes.data() + index * size, size);
  return std::bit_cast<float>(dtype == DType::bf16 ? bits << 16 : bits);
}

// Largest error of a product, as a share of the bound that docs/qgemm.md gives it.
double share_of_bound(Device device, const PackedWeight& weight, const std::vector<float>& decoded,
                      DType dtype, bool transposed) {
  const int64_t inner = transposed ? kN : kK, outer = transposed ? kK : kN;
  const std::vector<uint8_t> x = bytes_of(RandomValues(2).values(kM * inner), dtype);
  const auto plan = QgemmPlan::select(
      device, {.spec = weight.spec, .m = kM, .n = kN, .k = kK, .transposed = transposed, .dtype = dtype});
  const Tensor input = Tensor::copy_of({const_cast<uint8_t*>(x.data()), dtype, {kM, inner}}).to(device);
  const Tensor output(device, dtype, {kM, outer});
  const Memory workspace(device, plan.workspace_size());
  plan.run(nullptr, workspace, {.x = input.view(), .weight = weight, .y = output.view()});
  plan.status(nullptr, workspace);  // waits
  const Tensor result = output.to(Device{});
  const auto* const data = reinterpret_cast<const uint8_t*>(result.data());
  const std::vector<uint8_t> y(data, data + result.num_bytes());

  // bf16 products round the weight and the result to bf16; f32 products round sums only.
  const double rounding = dtype == DType::bf16 ? 0x1p-7 : 0, sums = 2 * static_cast<double>(inner) * 0x1p-24;
  double largest = 0;
  for (int64_t m = 0; m < kM; ++m)
    for (int64_t o = 0; o < outer; ++o) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < inner; ++i) {
        const float w = decoded[static_cast<size_t>(transposed ? i * kK + o : o * kK + i)];
        const double term = static_cast<double>(value_at(x, dtype, static_cast<size_t>(m * inner + i))) *
                            static_cast<double>(w);
        sum += term;
        magnitude += std::fabs(term);
      }
      const double error =
          std::fabs(static_cast<double>(value_at(y, dtype, static_cast<size_t>(m * outer + o))) - sum);
      largest = std::max(largest, error / ((rounding + sums) * magnitude));
    }
  std::printf("%-10s %s: error at most %.3f of the bound, weights %s, %s\n",
              transposed ? "transposed" : "forward", to_string(dtype), largest,
              to_string(plan.precision_guarantee().weight_rounding), to_string(plan.sku()).c_str());
  return largest;
}

}  // namespace

int main(int argc, char** argv) try {
  const Device device = parse_device(argc > 1 ? argv[1] : "cpu");
  std::vector<float> w = RandomValues(1).values(kN * kK, 0.05f), decoded(w.size());

  // Once: the weight to NF4 in groups of 64, and to the form that products in both directions read.
  QuantizedTensor q = quantize({w.data(), DType::f32, {kN, kK}}, QuantSpec{});
  dequantize(q, {decoded.data(), DType::f32, {kN, kK}});
  const PackedTensor packed = q.to(device).pack();
  double largest = 0;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const bool transposed : {false, true})
      largest = std::max(largest, share_of_bound(device, packed.view(), decoded, dtype, transposed));
  return largest <= 1 ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
