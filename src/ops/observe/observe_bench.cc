#include "benchmark/problem.h"
#include "halfbyte/observe.hpp"

namespace halfbyte {
namespace {

BenchProblem make_problem(const BenchGrouping& grouping, DType dtype, ObserverKind kind, double target) {
  ObserveDescriptor d;
  d.shape = {kBenchExtent, kBenchExtent};
  d.granularity = grouping.granularity;
  d.axis = grouping.axis;
  d.group_size = grouping.group_size;
  d.dtype = dtype;
  d.observer.kind = kind;
  BenchProblem p;
  p.op = "observe";
  p.name = std::string(grouping.name) + " " + to_string(dtype) + " " + to_string(kind);
  p.dtype = dtype;
  p.target = target;
  const std::vector<int64_t> groups = d.state_shape();
  const int64_t state_bytes = contiguous_bytes(DType::f32, groups);
  const size_t x = p.add(contiguous_bytes(dtype, d.shape), {BenchFill::normal, dtype}),
               min = p.add(state_bytes), max = p.add(state_bytes), num_batches = p.add(8);
  p.reads({x, min, max});
  p.writes({min, max});
  const auto args = [=](const BenchMemory& memory) {
    return Observe::Args{memory.view(x, dtype, d.shape), memory.view(min, DType::f32, groups),
                         memory.view(max, DType::f32, groups), memory.view(num_batches, DType::i64, {})};
  };
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    return bench_run<Observe>(memory, preference, d, args(memory));
  };
  p.prepare = [=](const BenchMemory& memory) {
    const Observe::Args of = args(memory);
    reset_observer(of.min, of.max, of.num_batches);
  };
  return p;
}

}  // namespace

BenchProblems observe_problems(DeviceKind device) {
  BenchProblems problems;
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average}) {
      const bool averages = kind == ObserverKind::moving_average;
      if (averages && device == DeviceKind::cpu) continue;
      for (const BenchGrouping& grouping : {kBenchTensor, kBenchChannel, kBenchGroup})
        problems.push_back(make_problem(grouping, dtype, kind, 0.9));
      problems.push_back(make_problem(kBenchColumn, dtype, kind, 0));
      if (!averages) problems.push_back(make_problem(kBenchGroupRows, dtype, kind, 0));
    }
  return problems;
}

}  // namespace halfbyte
