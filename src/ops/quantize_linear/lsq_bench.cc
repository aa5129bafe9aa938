// `fake_quantize_learned_backward` beside a copy of as many bytes, in turn with it: the counter of_copy is
// its time by ours.
#include <chrono>

#include "halfbyte/fake_quantize.hpp"
#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{16384, 8192};

double seconds(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run(benchmark::State& state, const FakeQuantizeDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = FakeQuantizeLearnedBackwardPlan::select({}, descriptor, {threads});
  const std::vector<int64_t> scale_shape = descriptor.scale_shape();
  const int64_t dense_bytes = contiguous_bytes(descriptor.dtype, kShape),
                scale_bytes = contiguous_bytes(DType::f32, scale_shape);
  const Buffer x = make_buffer(dense_bytes), dy = make_buffer(dense_bytes), scale = make_buffer(scale_bytes),
               zero = make_buffer(scale_bytes), dscale = make_buffer(scale_bytes),
               dzero = make_buffer(scale_bytes), workspace = make_buffer(plan.workspace_size());
  for (const Buffer* buffer : {&x, &dy}) {
    if (descriptor.dtype == DType::bf16) fill_weights(buffer->get(), dense_bytes / 2);
    if (descriptor.dtype == DType::f32)
      for (int64_t i = 0; i < dense_bytes / 4; ++i)
        reinterpret_cast<float*>(buffer->get())[i] =
            static_cast<float>((i * 2654435761) % 4001 - 2000) * 0.00005f;
  }
  for (int64_t i = 0; i < scale_bytes / 4; ++i) {
    reinterpret_cast<float*>(scale.get())[i] = 0.005f + 1e-9f * static_cast<float>(i % 1000);
    reinterpret_cast<float*>(zero.get())[i] = 1.25f;
  }
  const auto view = [&](const Buffer& buffer, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{buffer.get(), dtype, shape, {}, {}};
  };
  const TensorView dense = view(x, descriptor.dtype, kShape), gradients = view(dy, descriptor.dtype, kShape);
  FakeQuantizeLearnedBackward::Args args{dense, gradients, view(scale, DType::f32, scale_shape),
                                         {},    gradients, view(dscale, DType::f32, scale_shape),
                                         {}};
  if (descriptor.zero_point_dtype) {
    args.zero_point = view(zero, DType::f32, scale_shape);
    args.dzero_point = view(dzero, DType::f32, scale_shape);
  }
  const int64_t bytes = 3 * dense_bytes;
  double ours = 1e9, copy = 1e9;  // the best of each: seconds a byte
  for (auto _ : state) {
    const double time = seconds([&] { plan.run(nullptr, workspace.get(), args); });
    state.SetIterationTime(time);
    ours = std::min(ours, time / static_cast<double>(bytes));
    const double moved = seconds([&] { bare_move(x.get(), dense_bytes, dy.get(), dense_bytes, threads); });
    copy = std::min(copy, moved / static_cast<double>(2 * dense_bytes));
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["of_copy"] = copy / ours;
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
