// A plan: quantize the rows of a matrix to int8 with a scale each that is computed, decode them, look at the
// error.
//   plan_cpp [DEVICE]      cpu (the default), cuda, cuda:1
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "halfbyte/device.hpp"
#include "halfbyte/quantize_linear.hpp"

using namespace halfbyte;

int main(int argc, char** argv) try {
  const Device device = parse_device(argc > 1 ? argv[1] : "cpu");
  const int64_t rows = 64, cols = 1000, n = rows * cols;
  const auto float_bytes = static_cast<int64_t>(sizeof(float));

  // Once: choose and compile the kernels, take the memory.
  LinearDescriptor descriptor = LinearDescriptor::per_token({rows, cols});
  descriptor.computed = true;
  const auto quantize = QuantizeLinearPlan::select(device, descriptor);
  const auto dequantize = DequantizeLinearPlan::select(device, descriptor);
  std::printf("%s\n%s\n", to_string(quantize.sku()).c_str(), to_string(dequantize.sku()).c_str());
  const Stream stream(device);
  const Memory workspace(device, std::max(quantize.workspace_size(), dequantize.workspace_size()));
  const Memory x(device, n * float_bytes), codes(device, n), scales(device, rows * float_bytes);
  const Memory y(device, n * float_bytes);
  const auto view = [&](const Memory& memory, DType dtype, std::vector<int64_t> shape) {
    return TensorView{memory.data(), dtype, std::move(shape), {}, device, memory.num_bytes()};
  };
  const TensorView x_view = view(x, DType::f32, {rows, cols}), y_view = view(y, DType::f32, {rows, cols});
  const TensorView codes_view = view(codes, DType::i8, {rows, cols});
  const TensorView scales_view = view(scales, DType::f32, descriptor.scale_shape());

  // Many times: nothing is allocated or compiled, nothing waits.
  std::vector<float> values(static_cast<size_t>(n)), decoded(values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i * i % 1000));
  copy(device, x.data(), values.data(), n * float_bytes, stream.handle());
  quantize.run(stream.handle(), workspace, {x_view, codes_view, scales_view, {}});
  const QuantizeStatus status = quantize.status(stream.handle(), workspace);  // waits
  dequantize.run(stream.handle(), workspace, {codes_view, scales_view, {}, y_view});
  copy(device, decoded.data(), y.data(), n * float_bytes, stream.handle());
  stream.synchronize();

  float largest = 0;
  for (size_t i = 0; i < values.size(); ++i) largest = std::max(largest, std::fabs(decoded[i] - values[i]));
  std::printf("%lld elements not finite, largest error %.5f\n", static_cast<long long>(status.num_nonfinite),
              static_cast<double>(largest));
  return status.ok() && largest <= 0.51f / 127 ? 0 : 1;  // half a step of a scale that is at most 1 / 127
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
