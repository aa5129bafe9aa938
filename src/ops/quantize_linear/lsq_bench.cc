// `fake_quantize_learned_backward` beside a copy of the same bytes.
#include "halfbyte/fake_quantize.hpp"

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{8192, 8192};

void run(benchmark::State& state, const FakeQuantizeDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = FakeQuantizeLearnedBackwardPlan::select({}, descriptor, {threads});
  const std::vector<int64_t> scale_shape = descriptor.scale_shape();
  const int64_t dense_bytes = contiguous_bytes(descriptor.dtype, kShape),
                scale_bytes = contiguous_bytes(DType::f32, scale_shape);
  const Buffer x = make_buffer(dense_bytes), dy = make_buffer(dense_bytes), dx = make_buffer(dense_bytes),
               scale = make_buffer(scale_bytes), zero = make_buffer(scale_bytes),
               dscale = make_buffer(scale_bytes), dzero = make_buffer(scale_bytes),
               workspace = make_buffer(plan.workspace_size());
  for (const Buffer* buffer : {&x, &dy}) {
    if (descriptor.dtype == DType::bf16) fill_weights(buffer->get(), dense_bytes / 2);
    if (descriptor.dtype == DType::f32) fill_floats(buffer->get(), dense_bytes / 4);
  }
  for (int64_t i = 0; i < scale_bytes / 4; ++i) {
    reinterpret_cast<float*>(scale.get())[i] = 0.005f + 1e-9f * static_cast<float>(i % 1000);
    reinterpret_cast<float*>(zero.get())[i] = 1.25f;
  }
  const auto view = [&](const Buffer& buffer, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{buffer.get(), dtype, shape, {}, {}};
  };
  const TensorView dense = view(x, descriptor.dtype, kShape), gradients = view(dy, descriptor.dtype, kShape);
  FakeQuantizeLearnedBackward::Args args{dense,
                                         gradients,
                                         view(scale, DType::f32, scale_shape),
                                         {},
                                         view(dx, descriptor.dtype, kShape),
                                         view(dscale, DType::f32, scale_shape),
                                         {}};
  if (descriptor.zero_point_dtype) {
    args.zero_point = view(zero, DType::f32, scale_shape);
    args.dzero_point = view(dzero, DType::f32, scale_shape);
  }
  const int64_t scales = descriptor.zero_point_dtype ? 2 * scale_bytes : scale_bytes;
  beside_copy(state, 2 * dense_bytes + scales, dense_bytes + scales, threads,
              [&] { plan.run(nullptr, workspace.get(), args); });
}

void add(const char* name, Granularity granularity, int axis, int64_t group_size) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const bool learned_zero : {false, true}) {
      FakeQuantizeDescriptor descriptor;
      descriptor.shape = kShape;
      descriptor.granularity = granularity;
      descriptor.axis = axis;
      descriptor.group_size = group_size;
      descriptor.dtype = dtype;
      if (learned_zero) descriptor.zero_point_dtype = DType::f32;
      const std::string full = std::string("BM_fake_quantize_learned_backward/") + to_string(dtype) + "_" +
                               name + (learned_zero ? "_zero" : "");
      benchmark::RegisterBenchmark(full.c_str(), run, descriptor)
          ->Arg(2)
          ->Unit(benchmark::kMillisecond)
          ->UseManualTime();
    }
}

[[maybe_unused]] const bool kAdded = [] {
  add("tensor", Granularity::tensor, -1, 0);
  add("channel0", Granularity::channel, 0, 0);
  add("channel1", Granularity::channel, 1, 0);
  add("g64", Granularity::group, 1, 64);
  add("g64_axis0", Granularity::group, 0, 64);
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
