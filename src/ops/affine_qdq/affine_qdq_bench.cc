// `affine_qdq`, `affine_qdq_backward` and `affine_init` beside a copy of the same bytes.
#include "halfbyte/affine_qdq.hpp"

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

constexpr int64_t kSize = 8192;  // rows and columns

template <class Op>
void run(benchmark::State& state, const AffineQdqDescriptor& d) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = Plan<Op>::select({}, d, {threads});
  const int64_t dense_bytes = contiguous_bytes(d.dtype, std::vector<int64_t>{d.rows, d.cols}),
                code_bytes = contiguous_bytes(DType::u8, d.code_shape()),
                num_groups = contiguous_bytes(DType::u8, d.scale_shape());
  const Buffer dense = make_buffer(dense_bytes), codes = make_buffer(code_bytes),
               workspace = make_buffer(plan.workspace_size());
  if (d.dtype == DType::bf16) fill_weights(dense.get(), dense_bytes / 2);
  if (d.dtype == DType::f32) fill_floats(dense.get(), dense_bytes / 4);
  for (int64_t i = 0; i < code_bytes; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>(i * 37);
  std::vector<Buffer> parameters;
  for (int i = 0; i < 8; ++i) parameters.push_back(make_buffer(num_groups * 4));
  for (const Buffer& buffer : parameters)
    for (int64_t i = 0; i < num_groups; ++i) reinterpret_cast<float*>(buffer.get())[i] = 0.001f;
  const auto group_view = [&](int i, DType dtype) {
    return TensorView{parameters[static_cast<size_t>(i)].get(), dtype, d.scale_shape(), {}, {}};
  };
  const TensorView x{dense.get(), d.dtype, {d.rows, d.cols}, {}, {}},
      code{codes.get(), DType::u8, d.code_shape(), {}, {}};
  typename Op::Args args;
  int64_t reads = code_bytes, writes = dense_bytes;
  if constexpr (std::is_same_v<Op, AffineQdqBackward>) {
    args.codes = code;
    args.dy = x;
    TensorView* const tensors[] = {&args.dscales, &args.dbiases, &args.scales, &args.biases,
                                   &args.scale_m, &args.scale_v, &args.bias_m, &args.bias_v};
    for (int i = d.adam ? 2 : 0; i < (d.adam ? 8 : 2); ++i) *tensors[i] = group_view(i, DType::f32);
    reads += dense_bytes + (d.adam ? num_groups * 24 : 0);
    writes = num_groups * (d.adam ? 24 : 8);
  } else {
    const int64_t group_bytes = num_groups * 2 * size_of(d.scale_dtype);
    const TensorView scales = group_view(0, d.scale_dtype), biases = group_view(1, d.scale_dtype);
    if constexpr (std::is_same_v<Op, AffineInit>)
      args = {x, code, scales, biases}, reads = dense_bytes, writes = code_bytes + group_bytes;
    else
      args = {code, scales, biases, x}, reads += group_bytes;
  }
  beside_copy(state, reads, writes, threads, [&] { plan.run(nullptr, workspace.get(), args); });
}

template <class Op>
void add(const char* op, AffineQdqDescriptor d) {
  d.rows = d.cols = kSize;
  const std::string name = std::string("BM_") + op + "/" + to_string(d.dtype) +
                           (d.packed ? "_u" : "_byte_u") + std::to_string(d.bits) + "_g" +
                           std::to_string(d.group_size) + (d.adam ? "_adam" : "");
  benchmark::RegisterBenchmark(name.c_str(), run<Op>, d)
      ->Arg(2)
      ->Unit(benchmark::kMillisecond)
      ->UseManualTime();
}

[[maybe_unused]] const bool kAdded = [] {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const bool packed : {true, false}) {
      AffineQdqDescriptor d;
      d.dtype = dtype;
      d.packed = packed;
      add<AffineQdq>("affine_qdq", d);
      add<AffineQdqBackward>("affine_qdq_backward", d);
      add<AffineInit>("affine_init", d);
      d.adam = true;
      add<AffineQdqBackward>("affine_qdq_backward", d);
      d.adam = false;
      if (!packed) continue;
      for (const int64_t group_size : {32, 128, 100}) {
        d.group_size = group_size;
        add<AffineQdqBackward>("affine_qdq_backward", d);
      }
      d.group_size = 64;
      d.bits = 3;
      add<AffineQdq>("affine_qdq", d);
      add<AffineQdqBackward>("affine_qdq_backward", d);
    }
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
