#include "benchmark/problem.h"
#include "halfbyte/quantize_plan.hpp"

namespace halfbyte {
namespace {

constexpr int64_t kCols = 8192;

BenchProblem make_problem(const BenchSpec& test) {
  BenchProblem p;
  p.op = "quantize";
  p.name = bench_name(test);
  p.format = info(test.spec.format).name;
  p.dtype = test.dtype;
  p.target = test.target;
  const size_t x = p.add(test.rows * kCols * size_of(test.dtype), {BenchFill::normal, test.dtype});
  const BenchMatrix out(p, test.spec, test.rows, kCols, false);
  p.reads({x});
  p.writes({out.codes, out.scales, out.zeros, out.biases});
  p.has_more_ceilings = true;
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    return bench_run<Quantize>(
        memory, preference,
        {.spec = test.spec, .rows = test.rows, .cols = kCols, .dtype = test.dtype, .encoding = test.encoding},
        {memory.view(x, test.dtype, {test.rows, kCols}), out.view(memory)});
  };
  return p;
}

}  // namespace

std::string bench_name(const BenchSpec& test) {
  const std::string group = test.spec.granularity == Granularity::group
                                ? "g" + std::to_string(test.spec.group_size)
                                : to_string(test.spec.granularity);
  return std::to_string(test.rows) + "x" + std::to_string(kCols) + " " + test.name + " " + group + " " +
         to_string(test.dtype);
}

std::vector<BenchSpec> bench_specs_cuda() {
  std::vector<BenchSpec> cases;
  const auto add = [&](int64_t rows, const std::string& name, const QuantSpec& spec, double target,
                       DType dtype = DType::bf16, const Encoding& encoding = {}) {
    cases.push_back({name, spec, target, dtype, rows, encoding});
  };
  QuantSpec nf4, int4{.format = Format::int4, .scale_dtype = DType::f16},
      affine4{.format = Format::affine4, .scale_dtype = DType::f16};
  const Encoding half_range{ScaleRule::half_range}, edge{ScaleRule::mlx_edge, CodeScale::unrounded};
  for (const int64_t rows : {8192, 28672}) {
    for (const int64_t group_size : {64, 128}) {
      nf4.group_size = int4.group_size = affine4.group_size = group_size;
      add(rows, "nf4", nf4, 0.9);
      add(rows, "int4", int4, 0.9, DType::bf16, half_range);
      add(rows, "affine4", affine4, 0.9);
      for (const FormatInfo& format : all_formats()) {
        if (format.scale_dtype) continue;
        QuantSpec spec{.format = format.format, .group_size = group_size};
        if (format.kind != FormatKind::table) spec.scale_dtype = DType::f16;
        if (format.format == Format::lut4)
          spec.table = {-1,    -0.7f, -0.53f, -0.4f, -0.29f, -0.19f, -0.1f, 0,
                        0.08f, 0.16f, 0.25f,  0.34f, 0.44f,  0.57f,  0.73f, 0.95f};
        if (spec.format == Format::nf4 || spec == affine4) continue;
        add(rows, spec.format == Format::int4 ? "int4_absmax" : format.name, spec, 0.8);
      }
      QuantSpec asymmetric = int4;
      asymmetric.asymmetric = true;
      add(rows, "int4_asymmetric", asymmetric, 0.8);
      add(rows, "affine4_mlx_edge", affine4, 0.8, DType::bf16, edge);
    }
    if (rows > kBenchExtent) continue;
    for (QuantSpec spec : {nf4, int4}) {
      const std::string name = info(spec.format).name;
      const Encoding encoding = spec.format == Format::int4 ? half_range : Encoding{};
      for (const int64_t group_size : {32, 256, 100}) {
        spec.group_size = group_size;
        add(rows, name, spec, 0, DType::bf16, encoding);
      }
      for (const Granularity granularity : {Granularity::channel, Granularity::tensor}) {
        spec.granularity = granularity;
        add(rows, name, spec, 0, DType::bf16, encoding);
      }
    }
    nf4.group_size = 64;
    add(rows, "nf4", nf4, 0, DType::f16);
    add(rows, "nf4", nf4, 0, DType::f32);
  }
  return cases;
}

BenchProblems quantize_problems(DeviceKind device) {
  BenchProblems problems;
  const int64_t rows = device == DeviceKind::cuda ? 8192 : 65536;
  const auto add = [&](const char* name, const QuantSpec& spec, const Encoding& encoding = {},
                       DType dtype = DType::bf16) {
    problems.push_back(make_problem({name, spec, 0, dtype, rows, encoding}));
  };
  const QuantSpec nf4{.format = Format::nf4}, int4{.format = Format::int4, .group_size = 128},
      affine4{.format = Format::affine4},
      nvfp4{.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3};
  const auto add_searched = [&](DType dtype) {
    const auto searched = [](ScaleRule rule) { return Encoding{rule, CodeScale::stored, true}; };
    add("nf4_search", nf4, searched(ScaleRule::absmax), dtype);
    add("int4_search", int4, searched(ScaleRule::half_range), dtype);
    add("affine4_search", affine4, searched(ScaleRule::mlx_edge), dtype);
    add("nvfp4_search", nvfp4, searched(ScaleRule::absmax), dtype);
  };
  if (device == DeviceKind::cuda)
    for (const BenchSpec& test : bench_specs_cuda()) problems.push_back(make_problem(test));
  add_searched(DType::bf16);
  if (device == DeviceKind::cuda) return problems;
  add_searched(DType::f32);
  for (const DType dtype : {DType::bf16, DType::f32}) {
    add("nf4", nf4, {}, dtype);
    add("int4", int4, {ScaleRule::half_range}, dtype);
    add("affine4", affine4, {ScaleRule::mlx_edge}, dtype);
    add("nvfp4", nvfp4, {}, dtype);
  }
  add("fp4", {.format = Format::fp4});
  add("int4_asymmetric", {.format = Format::int4, .asymmetric = true, .group_size = 128});
  add("int8", {.format = Format::int8, .granularity = Granularity::channel});
  add("affine3", {.format = Format::affine3});
  add("fp8", {.format = Format::fp8, .granularity = Granularity::channel});
  return problems;
}

}  // namespace halfbyte
