// Integers by groups into a product: a weight to unsigned 4-bit codes with zero points, by a plan; the same
// codes as a weight of qgemm; and back.
//   group_product_cpp [DEVICE]      cpu (the default), cuda, cuda:1
// Exit code 1: a product or a code is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "halfbyte/convert.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/qgemm.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "random_values.h"

using namespace halfbyte;

int main(int argc, char** argv) try {
  const Device device = parse_device(argc > 1 ? argv[1] : "cpu");
  const int64_t m = 3, n = 96, k = 256, group = 64;
  const std::vector<float> w = RandomValues(1).values(n * k, 0.05f), x = RandomValues(2).values(m * k);

  // Codes 0 ... 15, a scale and a zero point for 64 values of a row: computed here, they could be given.
  LinearDescriptor d = LinearDescriptor::per_group({n, k}, group);
  d.q_min = 0;
  d.q_max = 15;
  d.code_dtype = DType::u4;
  d.zero_point_dtype = DType::i32;
  d.computed = true;
  d.scale_rule = ScaleRule::minmax;
  const auto quantize = QuantizeLinearPlan::select(device, d);
  const auto decode = DequantizeLinearPlan::select(device, d);
  const Memory workspace(device, std::max(quantize.workspace_size(), decode.workspace_size()));
  const Tensor weight = Tensor::copy_of({const_cast<float*>(w.data()), DType::f32, {n, k}}).to(device);
  const Tensor codes(device, DType::u4, {n, k}), scale(device, DType::f32, d.scale_shape());
  const Tensor zero_point(device, DType::i32, d.scale_shape()), decoded(device, DType::f32, {n, k});
  quantize.run(
      nullptr, workspace,
      {.x = weight.view(), .codes = codes.view(), .scale = scale.view(), .zero_point = zero_point.view()});
  decode.run(
      nullptr, workspace,
      {.codes = codes.view(), .scale = scale.view(), .zero_point = zero_point.view(), .y = decoded.view()});
  decode.status(nullptr, workspace);  // waits

  // The same codes as a weight of products.
  const QuantizedTensor q = from_linear(d, codes.view(), scale.view(), zero_point.view());
  const PackedTensor packed = q.pack();
  const auto product =
      QgemmPlan::select(device, {.spec = q.spec, .m = m, .n = n, .k = k, .dtype = DType::f32});
  const Memory product_workspace(device, product.workspace_size());
  const Tensor input = Tensor::copy_of({const_cast<float*>(x.data()), DType::f32, {m, k}}).to(device);
  const Tensor output(device, DType::f32, {m, n});
  product.run(nullptr, product_workspace, {.x = input.view(), .weight = packed.view(), .y = output.view()});
  product.status(nullptr, product_workspace);

  // Beside the sums in f64 over what the plan decodes.
  const Tensor y = output.to(Device{}), w_hat = decoded.to(Device{});
  const auto* const values = reinterpret_cast<const float*>(y.data());
  const auto* const weights = reinterpret_cast<const float*>(w_hat.data());
  double largest = 0;
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < k; ++c) {
        const double term =
            static_cast<double>(x[static_cast<size_t>(i * k + c)]) * static_cast<double>(weights[j * k + c]);
        sum += term;
        magnitude += std::fabs(term);
      }
      const double bound = 2 * static_cast<double>(k) * 0x1p-24 * magnitude;
      largest = std::max(largest, std::fabs(static_cast<double>(values[i * n + j]) - sum) / bound);
    }

  // And back: the same values, as integers of a plan.
  const LinearCodes back = to_linear(q);
  const Tensor again(device, DType::f32, {n, k});
  DequantizeLinearPlan::select(device, back.descriptor)
      .run(nullptr, workspace,
           {.codes = back.codes.view(),
            .scale = back.scale.view(),
            .zero_point = back.zero_point.view(),
            .y = again.view()});
  const Tensor again_host = again.to(Device{});
  const bool same = std::memcmp(again_host.data(), w_hat.data(), static_cast<size_t>(w_hat.num_bytes())) == 0;
  std::printf("%s with zero points: error of the product at most %.3f of its bound; back: %s\n",
              info(q.spec.format).name, largest, same ? "the same values" : "OTHER values");
  return largest <= 1 && same ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
