#include "benchmark/problem.h"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/observe.hpp"

namespace halfbyte {
namespace {

BenchProblem make_problem(bool forward, const std::string& name, const FakeQuantizeDescriptor& d,
                          double target) {
  BenchProblem p;
  p.op = forward ? "fake_quantize" : "fake_quantize_backward";
  p.name = name + " " + to_string(d.dtype);
  p.dtype = d.dtype;
  p.target = target;
  const bool from_mask = !forward && d.mask;
  const std::vector<int64_t> groups = d.scale_shape();
  const BenchFill dense_fill{BenchFill::normal, d.dtype};
  const int64_t dense = contiguous_bytes(d.dtype, d.shape),
                state = d.observer ? contiguous_bytes(d.state_dtype(), groups) : 0;
  const double largest = d.format ? 0.1 : 0.01;
  const auto parameter = [&](bool has, DType dtype, double low, double high) {
    const BenchFill fill{BenchFill::uniform, dtype, low, high};
    return p.add(has ? contiguous_bytes(dtype, groups) : 0, d.computed ? BenchFill() : fill);
  };
  const size_t x = p.add(from_mask ? 0 : dense, dense_fill), dy = p.add(forward ? 0 : dense, dense_fill),
               y = p.add(dense),
               mask = p.add(d.mask ? contiguous_bytes(DType::u8, d.mask_shape()) : 0,
                            {forward ? BenchFill::poison : BenchFill::random}),
               scale = parameter(!from_mask, d.scale_dtype, largest / 2, largest),
               zero =
                   parameter(d.zero_point_dtype.has_value(), d.zero_point_dtype.value_or(DType::i32), -2, 2),
               min = p.add(state), max = p.add(state), num_batches = p.add(d.observer ? 8 : 0),
               global_scale =
                   p.add(d.format == Format::nvfp4 ? 4 : 0, {BenchFill::uniform, DType::f32, 2e4, 2e4});
  if (forward && d.computed)
    p.reads({x, min, max}), p.writes({y, mask, scale, zero, min, max});
  else if (forward)
    p.reads({x, scale, zero}), p.writes({y, mask});
  else if (from_mask)
    p.reads({dy, mask}), p.writes({y});
  else
    p.reads({x, dy, scale, zero}), p.writes({y});
  struct Views {
    TensorView x, dy, y, mask, scale, zero, min, max, num_batches, global_scale;
  };
  const auto views = [=](const BenchMemory& memory) {
    Views v;
    v.y = memory.view(y, d.dtype, d.shape);
    if (!forward) v.dy = memory.view(dy, d.dtype, d.shape);
    if (d.mask) v.mask = memory.view(mask, DType::u8, d.mask_shape());
    if (from_mask) return v;
    v.x = memory.view(x, d.dtype, d.shape);
    v.scale = memory.view(scale, d.scale_dtype, groups);
    if (d.zero_point_dtype) v.zero = memory.view(zero, *d.zero_point_dtype, groups);
    if (d.format == Format::nvfp4) v.global_scale = memory.view(global_scale, DType::f32, {1});
    if (!d.observer) return v;
    v.min = memory.view(min, d.state_dtype(), groups);
    v.max = memory.view(max, d.state_dtype(), groups);
    v.num_batches = memory.view(num_batches, DType::i64, {});
    return v;
  };
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    const Views v = views(memory);
    if (forward)
      return bench_run<FakeQuantize>(
          memory, preference, d,
          {v.x, v.y, v.scale, v.zero, v.mask, v.min, v.max, v.num_batches, v.global_scale});
    return bench_run<FakeQuantizeBackward>(memory, preference, d, {v.x, v.mask, v.dy, v.scale, v.zero, v.y});
  };
  if (d.observer)
    p.prepare = [=](const BenchMemory& memory) {
      const Views v = views(memory);
      reset_observer(v.min, v.max, v.num_batches);
    };
  return p;
}

}  // namespace

BenchProblems fake_quantize_problems(DeviceKind device) {
  BenchProblems problems;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const auto grouped = [&](const BenchGrouping& grouping) {
      FakeQuantizeDescriptor d;
      d.shape = {kBenchExtent, kBenchExtent};
      d.granularity = grouping.granularity;
      d.axis = grouping.axis;
      d.group_size = grouping.group_size;
      d.dtype = dtype;
      return d;
    };
    const FakeQuantizeDescriptor tensor = grouped(kBenchTensor), group = grouped(kBenchGroup);
    const auto add = [&](const std::string& name, const FakeQuantizeDescriptor& d, double target,
                         bool forward = true) { problems.push_back(make_problem(forward, name, d, target)); };
    const auto masked = [](FakeQuantizeDescriptor d) {
      d.mask = true;
      return d;
    };
    const auto computed = [](FakeQuantizeDescriptor d) {
      d.computed = true;
      return d;
    };
    const auto block_floats = [&](Format format, bool computed_global_scale = false) {
      FakeQuantizeDescriptor d = computed(group);
      d.format = format;
      d.group_size = info(format).group_size;
      d.scale_dtype = *info(format).scale_dtype;
      d.computed_global_scale = computed_global_scale;
      return d;
    };
    constexpr double kTarget = 0.9;
    for (const BenchGrouping& grouping : {kBenchTensor, kBenchChannel, kBenchGroup}) {
      add(grouping.name, grouped(grouping), kTarget);
      add(grouping.name, grouped(grouping), kTarget, false);
    }
    add("channel axis 1", grouped(kBenchColumn), 0);
    add("tensor with mask", masked(tensor), 0);
    add("group 64 with mask", masked(group), 0);
    add("from mask", masked(tensor), kTarget, false);
    add("mxfp4", block_floats(Format::mxfp4), 0);
    add("nvfp4", block_floats(Format::nvfp4), 0);
    add("nvfp4 with the global scale", block_floats(Format::nvfp4, true), 0);
    if (device == DeviceKind::cpu) {
      add("channel axis 1", grouped(kBenchColumn), 0, false);
      add("channel with mask", masked(grouped(kBenchChannel)), 0);
      add("channel axis 1 with mask", masked(grouped(kBenchColumn)), 0);
      continue;
    }
    FakeQuantizeDescriptor asymmetric = group, nf4 = group, observed = computed(group);
    asymmetric.zero_point_dtype = DType::i32;
    nf4.format = Format::nf4;
    observed.observer.emplace().kind = ObserverKind::moving_average;
    add("group 64 zero point", asymmetric, 0);
    add("group 64 nf4", nf4, 0);
    add("computed group 64", computed(group), kTarget);
    add("computed tensor", computed(tensor), 0);
    add("computed channel", computed(grouped(kBenchChannel)), 0);
    add("observed group 64", observed, 0);
  }
  return problems;
}

}  // namespace halfbyte
