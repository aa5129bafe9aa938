// `observe` beside a copy of the same bytes: reads, and writes of the state.
#include "halfbyte/observe.hpp"

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{8192, 8192};

void run(benchmark::State& state, const ObserveDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = ObservePlan::select({}, descriptor, {threads});
  const std::vector<int64_t> groups = descriptor.state_shape();
  const int64_t bytes = contiguous_bytes(descriptor.dtype, kShape),
                state_bytes = contiguous_bytes(DType::f32, groups);
  const Buffer x = make_buffer(bytes), min = make_buffer(state_bytes), max = make_buffer(state_bytes),
               num_batches = make_buffer(8), workspace = make_buffer(plan.workspace_size());
  if (descriptor.dtype == DType::bf16) fill_weights(x.get(), bytes / 2);
  if (descriptor.dtype == DType::f32) fill_floats(x.get(), bytes / 4);
  const Observe::Args args{{x.get(), descriptor.dtype, kShape, {}, {}},
                           {min.get(), DType::f32, groups, {}, {}},
                           {max.get(), DType::f32, groups, {}, {}},
                           {num_batches.get(), DType::i64, {}, {}, {}}};
  reset_observer(args.min, args.max, args.num_batches);
  beside_copy(state, bytes + 2 * state_bytes, 2 * state_bytes, threads,
              [&] { plan.run(nullptr, workspace.get(), args); });
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
