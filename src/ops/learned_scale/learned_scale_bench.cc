#include "benchmark/problem.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte {
namespace {

BenchProblem make_problem(const BenchGrouping& grouping, FakeQuantizeDescriptor d, const char* what,
                          double target) {
  d.shape = {kBenchExtent, kBenchExtent};
  d.granularity = grouping.granularity;
  d.axis = grouping.axis;
  d.group_size = grouping.group_size;
  d.gradient_scale = 1e-3;
  BenchProblem p;
  p.op = "fake_quantize_learned_backward";
  p.name = std::string(grouping.name) + " " + to_string(d.dtype) + " " + what;
  p.dtype = d.dtype;
  p.target = target;
  const std::vector<int64_t> groups = d.scale_shape();
  const int64_t dense = contiguous_bytes(d.dtype, d.shape), scales = contiguous_bytes(DType::f32, groups),
                zeros = d.zero_point_dtype ? scales : 0;
  const double largest = d.format ? 0.1 : 0.01;
  const size_t x = p.add(dense, {BenchFill::normal, d.dtype}),
               dy = p.add(dense, {BenchFill::normal, d.dtype}),
               scale = p.add(scales, {BenchFill::uniform, DType::f32, largest / 2, largest}),
               zero = p.add(zeros, {BenchFill::uniform, DType::f32, -2, 1}), dx = p.add(dense),
               dscale = p.add(scales), dzero = p.add(zeros);
  p.reads({x, dy, scale, zero});
  p.writes({dx, dscale, dzero});
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    const auto of_group = [&](size_t array) { return memory.view(array, DType::f32, groups); };
    FakeQuantizeLearnedBackward::Args args{memory.view(x, d.dtype, d.shape),
                                           memory.view(dy, d.dtype, d.shape),
                                           of_group(scale),
                                           {},
                                           memory.view(dx, d.dtype, d.shape),
                                           of_group(dscale),
                                           {}};
    if (d.zero_point_dtype) args.zero_point = of_group(zero), args.dzero_point = of_group(dzero);
    return bench_run<FakeQuantizeLearnedBackward>(memory, preference, d, args);
  };
  return p;
}

}  // namespace

BenchProblems learned_scale_problems(DeviceKind device) {
  BenchProblems problems;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    FakeQuantizeDescriptor scale;
    scale.dtype = dtype;
    FakeQuantizeDescriptor zero = scale, nf4 = scale;
    zero.zero_point_dtype = DType::f32;
    nf4.format = Format::nf4;
    for (const BenchGrouping& grouping :
         {kBenchTensor, kBenchChannel, kBenchGroup, kBenchColumn, kBenchGroupRows}) {
      const bool strided = grouping.axis == 1 || (grouping.axis == 0 && grouping.group_size > 0);
      const double target = strided ? 0 : 0.9;
      problems.push_back(make_problem(grouping, scale, "scale", target));
      problems.push_back(make_problem(grouping, zero, "scale and zero point", target));
      if (device == DeviceKind::cuda) problems.push_back(make_problem(grouping, nf4, "nf4", 0));
    }
  }
  return problems;
}

}  // namespace halfbyte
