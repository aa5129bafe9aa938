// `quantize_linear`, `dequantize_linear` and `quantize_linear_backward` beside a copy of as many bytes, in
// turn with it: the counter of_copy is its time by ours.
#include "halfbyte/quantize_linear.hpp"

#include <chrono>

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{16384, 8192};

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

double seconds(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
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
  if (descriptor.dtype == DType::f32)
    for (int64_t i = 0; i < dense_bytes / 4; ++i)
      reinterpret_cast<float*>(x.get())[i] = static_cast<float>((i * 2654435761) % 4001 - 2000) * 0.00005f;
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
  int64_t bytes = 3 * dense_bytes;
  if constexpr (std::is_same_v<Op, QuantizeLinear>)
    args = {dense, code, scales, zeros};
  else if constexpr (std::is_same_v<Op, DequantizeLinear>)
    args = {code, scales, zeros, dense};
  else
    args = {dense, other, scales, zeros, other};
  if constexpr (!std::is_same_v<Op, QuantizeLinearBackward>) bytes = dense_bytes + code_bytes;
  double ours = 0, copy = 0;
  for (auto _ : state) {
    const double time = seconds([&] { plan.run(nullptr, workspace.get(), args); });
    state.SetIterationTime(time);
    ours += time / static_cast<double>(bytes);
    const int64_t n = std::min(bytes / 2, dense_bytes);
    copy += seconds([&] { bare_move(x.get(), n, y.get(), n, threads); }) / static_cast<double>(2 * n);
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["of_copy"] = copy / ours;
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
