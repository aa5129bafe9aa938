#include "benchmark/problem.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {

// To the packed form and back.
BenchProblems reorder_problems(DeviceKind device) {
  BenchProblems problems;
  const int64_t rows = device == DeviceKind::cpu ? 65536 : kBenchExtent, cols = 8192;
  const auto add = [&](const char* name, const QuantSpec& spec, Layout layout, bool to_packed) {
    BenchProblem p;
    p.op = "reorder";
    p.name = std::to_string(rows) + "x" + std::to_string(cols) + " " + name + (to_packed ? "" : " back");
    p.format = info(spec.format).name;
    const QuantShape shape = quant_shape(spec, rows, cols);
    const int64_t scale_bytes = shape.num_groups * size_of(spec.scale_dtype);
    const auto fill = [](bool filled) { return BenchFill{filled ? BenchFill::random : BenchFill::poison}; };
    const size_t codes = p.add(shape.code_bytes(), fill(to_packed)),
                 scales = p.add(scale_bytes, fill(to_packed)),
                 biases = p.add(has_biases(spec) ? scale_bytes : 0, fill(to_packed)),
                 packed = p.add(packed_weight_bytes(spec, rows, cols), fill(!to_packed));
    if (to_packed)
      p.reads({codes, scales, biases}), p.writes({packed});
    else
      p.reads({packed}), p.writes({codes, scales, biases});
    p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
      WeightView view;
      view.spec = spec;
      view.rows = rows;
      view.cols = cols;
      view.layout = layout;
      view.codes = memory.at(codes);
      view.scales = memory.at(scales);
      if (has_biases(spec)) view.biases = memory.at(biases);
      view.device = memory.device;
      const PackedWeight to{
          .spec = spec, .rows = rows, .cols = cols, .data = memory.at(packed), .device = memory.device};
      BenchRun run;
      run.sku.op = run.sku.kernel = "reorder";
      run.run = [=](void* stream, const Workspace&) {
        if (to_packed)
          reorder(view, to, {preference.num_threads, stream});
        else
          reorder(to, view, {preference.num_threads, stream});
      };
      return run;
    };
    problems.push_back(std::move(p));
  };
  const QuantSpec flat{.format = Format::nf4, .granularity = Granularity::flat};
  add("nf4 g64 bitsandbytes", flat, Layout::bitsandbytes, true);
  add("nf4 g64 bitsandbytes", flat, Layout::bitsandbytes, false);
  add("int4 g128 compressed-tensors", {.format = Format::int4, .group_size = 128, .scale_dtype = DType::bf16},
      Layout::compressed_tensors, true);
  add("affine4 g64 mlx", {.format = Format::affine4, .scale_dtype = DType::bf16}, Layout::mlx, true);
  add("int8 g64", {.format = Format::int8}, Layout::halfbyte, true);
  add("int8 g64", {.format = Format::int8}, Layout::halfbyte, false);
  return problems;
}

}  // namespace halfbyte
