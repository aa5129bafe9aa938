#include "benchmark/problem.h"
#include "halfbyte/quantize_plan.hpp"

namespace halfbyte {
namespace {

constexpr int64_t kCols = 8192;

BenchProblem make_problem(const BenchSpec& test) {
  BenchProblem p;
  p.op = "dequantize";
  p.name = bench_name(test);
  p.format = info(test.spec.format).name;
  p.dtype = test.dtype;
  p.target = test.target;
  const BenchMatrix in(p, test.spec, test.rows, kCols, true);
  const size_t y = p.add(test.rows * kCols * size_of(test.dtype));
  p.reads({in.codes, in.scales, in.zeros, in.biases});
  p.writes({y});
  p.has_more_ceilings = true;
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    return bench_run<Dequantize>(memory, preference,
                                 {.spec = test.spec, .rows = test.rows, .cols = kCols, .dtype = test.dtype},
                                 {in.view(memory), memory.view(y, test.dtype, {test.rows, kCols})});
  };
  return p;
}

}  // namespace

BenchProblems dequantize_problems(DeviceKind device) {
  BenchProblems problems;
  if (device == DeviceKind::cuda) {
    for (const BenchSpec& test : bench_specs_cuda()) problems.push_back(make_problem(test));
    return problems;
  }
  const auto add = [&](const char* name, const QuantSpec& spec, DType dtype = DType::bf16) {
    problems.push_back(make_problem({name, spec, 0, dtype, 65536}));
  };
  const QuantSpec nf4;
  add("nf4", nf4);
  add("nf4", nf4, DType::f16);
  add("nf4", nf4, DType::f32);
  add("int4", {.format = Format::int4, .group_size = 128, .scale_dtype = DType::bf16});
  add("affine4", {.format = Format::affine4, .scale_dtype = DType::bf16});
  add("affine3", {.format = Format::affine3, .scale_dtype = DType::bf16});
  add("int8", {.format = Format::int8});
  add("fp8", {.format = Format::fp8, .group_size = 128, .scale_dtype = DType::bf16});
  return problems;
}

}  // namespace halfbyte
