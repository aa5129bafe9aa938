#include <cmath>

#include "benchmark/harness.h"
#include "benchmark/problem.h"
#include "core/checks.h"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"

namespace halfbyte {
namespace {

double us_since(BenchClock::time_point start) { return 1e6 * seconds_since(start); }

// The first plan and the fastest of later ones.
template <class Op>
BenchRow time_plans(Device device, const typename Op::Descriptor& descriptor, const std::string& name) {
  BenchRow row;
  row.op = "latency";
  row.problem = "plan " + name;
  const auto time = [&] {
    const BenchClock::time_point start = BenchClock::now();
    const auto plan = Plan<Op>::select(device, descriptor);
    row.sku = plan.sku();
    return us_since(start);
  };
  const double first = time();
  row.median_us = time();
  for (int i = 0; i < 100; ++i) row.median_us = std::min(row.median_us, time());
  row.ceilings = {{"first", first}};
  return row;
}

// What the host takes for a run, where the device has little to do.
BenchRow time_run(Device device) {
  constexpr int64_t kElements = 64;
  constexpr int kRuns = 500, kRounds = 20;
  const Stream stream(device);
  LinearDescriptor d = LinearDescriptor::per_tensor({kElements});
  d.dtype = DType::bf16;
  d.zero_point_dtype = DType::i32;
  const auto plan = QuantizeLinearPlan::select(device, d);
  const Memory memory(device, 4 * kBenchAlignment), workspace(device, plan.workspace_size());
  const auto view = [&](int number, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{memory.data() + number * kBenchAlignment, dtype, shape, {}, device};
  };
  const QuantizeLinear::Args args{view(0, d.dtype, d.shape), view(1, d.code_dtype, d.shape),
                                  view(2, d.scale_dtype, d.scale_shape()),
                                  view(3, *d.zero_point_dtype, d.scale_shape())};
  BenchRow row;
  row.op = "latency";
  row.problem = "run quantize_linear";
  row.sku = plan.sku();
  row.median_us = INFINITY;
  for (int round = 0; round < kRounds; ++round) {
    stream.synchronize();
    const BenchClock::time_point start = BenchClock::now();
    for (int i = 0; i < kRuns; ++i) plan.run(stream.handle(), workspace, args);
    row.median_us = std::min(row.median_us, us_since(start) / kRuns);
  }
  stream.synchronize();
  return row;
}

}  // namespace

void bench_latency(Device device, const std::function<bool(const BenchRow&)>& progress) {
  HALFBYTE_CHECK(device.kind == DeviceKind::cuda, usage, "bench_latency: it is for CUDA devices");
  check_device(device);
  const auto report = [&](const BenchRow& row) {
    HALFBYTE_CHECK(progress(row), cancelled, "bench_latency: cancelled");
  };
  report(time_run(device));  // NVRTC loads its parts with the first program
  for (const BenchSpec& test : bench_specs_cuda()) {
    if (test.rows <= kBenchExtent || test.spec.group_size != 64) continue;
    for (const DType dtype : {DType::bf16, DType::f64}) {
      const QuantizeDescriptor d{
          .spec = test.spec, .rows = 64, .cols = 4096, .dtype = dtype, .encoding = test.encoding};
      const std::string name = test.name + " " + to_string(dtype);
      report(time_plans<Quantize>(device, d, "quantize " + name));
      report(time_plans<Dequantize>(device, d, "dequantize " + name));
    }
  }
}

}  // namespace halfbyte
