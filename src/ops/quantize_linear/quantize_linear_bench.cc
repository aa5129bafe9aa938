// `quantize_linear`, `dequantize_linear` and `quantize_linear_backward` beside a copy of the same bytes.
#include "halfbyte/quantize_linear.hpp"

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{8192, 8192};

struct Setup {
  const char* name;
  LinearDescriptor descriptor;
};

std::vector<Setup> setups() {
  std::vector<Setup> all{{"tensor", LinearDescriptor::per_tensor(kShape)},
                         {"channel0", LinearDescriptor::per_channel(kShape, 0)},
                         {"channel1", LinearDescriptor::per_channel(kShape, 1)},
                         {"g128", LinearDescriptor::per_group(kShape, 128)},
                         {"g32", LinearDescriptor::per_group(kShape, 32)},
                         {"g128_axis0", LinearDescriptor::per_group(kShape, 128, 0)}};
  for (const Setup& given : {all[0], all[2], all[3], Setup{"token", LinearDescriptor::per_token(kShape)}}) {
    all.push_back(given);
    all.back().descriptor.computed = true;
  }
  return all;
}

template <class Op>
void run(benchmark::State& state, const LinearDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = Plan<Op>::select({}, descriptor, {threads});
  const std::vector<int64_t> scale_shape = descriptor.scale_shape();
  const int64_t dense_bytes = contiguous_bytes(descriptor.dtype, kShape),
                code_bytes = contiguous_bytes(descriptor.code_dtype, kShape),
                num_scales = contiguous_bytes(DType::i8, scale_shape);
  const Buffer x = make_buffer(dense_bytes), y = make_buffer(dense_bytes), codes = make_buffer(code_bytes),
               scale = make_buffer(num_scales * 4), zero = make_buffer(num_scales),
               workspace = make_buffer(plan.workspace_size());
  if (descriptor.dtype == DType::bf16) fill_weights(x.get(), dense_bytes / 2);
  if (descriptor.dtype == DType::f32) fill_floats(x.get(), dense_bytes / 4);
  for (int64_t i = 0; i < num_scales; ++i)
    reinterpret_cast<float*>(scale.get())[i] = 0.0008f + 1e-9f * static_cast<float>(i % 1000);
  std::fill_n(zero.get(), num_scales, uint8_t{3});
  const auto view = [&](const Buffer& buffer, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{buffer.get(), dtype, shape, {}, {}};
  };
  const TensorView dense = view(x, descriptor.dtype, kShape), other = view(y, descriptor.dtype, kShape),
                   code = view(codes, descriptor.code_dtype, kShape),
                   scales = view(scale, descriptor.scale_dtype, scale_shape),
                   zeros = view(zero, descriptor.code_dtype, scale_shape);
  typename Op::Args args;
  int64_t reads = num_scales * 5, writes = dense_bytes;
  if constexpr (std::is_same_v<Op, QuantizeLinear>)
    args = {dense, code, scales, zeros}, reads += dense_bytes, writes = code_bytes;
  else if constexpr (std::is_same_v<Op, DequantizeLinear>)
    args = {code, scales, zeros, dense}, reads += code_bytes;
  else
    args = {dense, other, scales, zeros, other}, reads += 2 * dense_bytes;
  beside_copy(state, reads, writes, threads, [&] { plan.run(nullptr, workspace.get(), args); });
}

template <class Op>
void add(const char* op, const Setup& setup, DType dtype, DType code_dtype) {
  LinearDescriptor descriptor = setup.descriptor;
  descriptor.dtype = dtype;
  descriptor.code_dtype = code_dtype;
  descriptor.zero_point_dtype = code_dtype;
  if (is_packed(code_dtype)) descriptor.q_min = -8, descriptor.q_max = 7;
  const std::string name = std::string("BM_") + op + "/" + to_string(dtype) + "_" + to_string(code_dtype) +
                           "_" + setup.name + (descriptor.computed ? "_computed" : "");
  benchmark::RegisterBenchmark(name.c_str(), run<Op>, descriptor)
      ->Arg(2)
      ->Unit(benchmark::kMillisecond)
      ->UseManualTime();
}

[[maybe_unused]] const bool kAdded = [] {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const DType code_dtype : {DType::i8, DType::i4})
      for (const Setup& setup : setups()) {
        add<QuantizeLinear>("quantize_linear", setup, dtype, code_dtype);
        if (setup.descriptor.computed) continue;
        add<DequantizeLinear>("dequantize_linear", setup, dtype, code_dtype);
        if (code_dtype == DType::i8)
          add<QuantizeLinearBackward>("quantize_linear_backward", setup, dtype, code_dtype);
      }
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
