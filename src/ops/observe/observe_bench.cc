// `observe` beside a copy of as many bytes and a bare read of x, in turn with them: the counters of_copy and
// of_read are their time by ours.
#include "halfbyte/observe.hpp"

#include <chrono>

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{16384, 8192};

double seconds(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run(benchmark::State& state, const ObserveDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = ObservePlan::select({}, descriptor, {threads});
  const std::vector<int64_t> groups = descriptor.state_shape();
  const int64_t bytes = contiguous_bytes(descriptor.dtype, kShape),
                state_bytes = contiguous_bytes(DType::f32, groups);
  const Buffer x = make_buffer(bytes), other = make_buffer(bytes), min = make_buffer(state_bytes),
               max = make_buffer(state_bytes), num_batches = make_buffer(8),
               workspace = make_buffer(plan.workspace_size());
  if (descriptor.dtype == DType::bf16) fill_weights(x.get(), bytes / 2);
  if (descriptor.dtype == DType::f32)
    for (int64_t i = 0; i < bytes / 4; ++i)
      reinterpret_cast<float*>(x.get())[i] = static_cast<float>((i * 2654435761) % 4001 - 2000) * 0.00005f;
  const Observe::Args args{{x.get(), descriptor.dtype, kShape, {}, {}},
                           {min.get(), DType::f32, groups, {}, {}},
                           {max.get(), DType::f32, groups, {}, {}},
                           {num_batches.get(), DType::i64, {}, {}, {}}};
  reset_observer(args.min, args.max, args.num_batches);
  double ours = 1e9, copy = 1e9, read = 1e9;  // the best of each
  for (auto _ : state) {
    const double time = seconds([&] { plan.run(nullptr, workspace.get(), args); });
    state.SetIterationTime(time);
    ours = std::min(ours, time);
    copy = std::min(copy, seconds([&] { bare_move(x.get(), bytes / 2, other.get(), bytes / 2, threads); }));
    read = std::min(read, seconds([&] { bare_read(x.get(), bytes, threads); }));
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["of_copy"] = copy / ours;
  state.counters["of_read"] = read / ours;
}

[[maybe_unused]] const bool kAdded = [] {
  struct Setup {
    const char* name;
    Granularity granularity;
    int axis;
    int64_t group_size;
  };
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Setup& setup :
         {Setup{"tensor", Granularity::tensor, -1, 0}, Setup{"channel0", Granularity::channel, 0, 0},
          Setup{"channel1", Granularity::channel, 1, 0}, Setup{"g64", Granularity::group, -1, 64},
          Setup{"g64_axis0", Granularity::group, 0, 64}}) {
      ObserveDescriptor descriptor;
      descriptor.shape = kShape;
      descriptor.dtype = dtype;
      descriptor.granularity = setup.granularity;
      descriptor.axis = setup.axis;
      descriptor.group_size = setup.group_size;
      benchmark::RegisterBenchmark((std::string("BM_observe/") + to_string(dtype) + "_" + setup.name).c_str(),
                                   run, descriptor)
          ->Arg(2)
          ->Unit(benchmark::kMillisecond)
          ->UseManualTime();
    }
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
