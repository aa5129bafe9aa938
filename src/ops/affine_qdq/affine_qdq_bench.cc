#include <array>

#include "benchmark/problem.h"
#include "halfbyte/affine_qdq.hpp"

namespace halfbyte {
namespace {

enum class Op { init, forward, backward };

BenchProblem make_problem(Op op, const AffineQdqDescriptor& d, double target) {
  BenchProblem p;
  constexpr const char* kNames[] = {"affine_init", "affine_qdq", "affine_qdq_backward"};
  p.op = kNames[static_cast<int>(op)];
  p.name = std::string(to_string(d.dtype)) + " u" + std::to_string(d.bits) + (d.packed ? "" : " in bytes") +
           " group " + std::to_string(d.group_size) + (d.adam ? " adam" : "");
  p.dtype = d.dtype;
  p.target = target;
  const BenchFill dense_fill{BenchFill::normal, d.dtype},
      parameter_fill{BenchFill::uniform, DType::f32, 5e-4, 1e-3};
  const bool writes_dense = op == Op::forward, writes_codes = op == Op::init;
  const size_t dense = p.add(d.rows * d.cols * size_of(d.dtype), writes_dense ? BenchFill() : dense_fill),
               codes = p.add(contiguous_bytes(DType::u8, d.code_shape()),
                             writes_codes ? BenchFill() : BenchFill{BenchFill::random});
  // Scales, biases, four moments, two gradients.
  std::array<size_t, 8> parameters{};
  for (size_t i = 0; i < parameters.size(); ++i)
    parameters[i] =
        p.add(contiguous_bytes(DType::f32, d.scale_shape()), i < 6 ? parameter_fill : BenchFill());
  const auto [scales, biases, scale_m, scale_v, bias_m, bias_v, dscales, dbiases] = parameters;
  if (op == Op::init)
    p.reads({dense}), p.writes({codes, scales, biases});
  else if (op == Op::forward)
    p.reads({codes, scales, biases}), p.writes({dense});
  else if (d.adam)
    p.reads({dense, codes, scales, biases, scale_m, scale_v, bias_m, bias_v}),
        p.writes({scales, biases, scale_m, scale_v, bias_m, bias_v});
  else
    p.reads({dense, codes}), p.writes({dscales, dbiases});
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    const TensorView x = memory.view(dense, d.dtype, {d.rows, d.cols}),
                     code = memory.view(codes, DType::u8, d.code_shape());
    std::array<TensorView, 8> v;
    for (size_t i = 0; i < v.size(); ++i) v[i] = memory.view(parameters[i], DType::f32, d.scale_shape());
    if (op == Op::init) return bench_run<AffineInit>(memory, preference, d, {x, code, v[0], v[1]});
    if (op == Op::forward) return bench_run<AffineQdq>(memory, preference, d, {code, v[0], v[1], x});
    AffineQdqBackward::Args args;
    args.codes = code;
    args.dy = x;
    TensorView* const adam[] = {&args.scales,  &args.biases, &args.scale_m,
                                &args.scale_v, &args.bias_m, &args.bias_v};
    for (size_t i = 0; d.adam && i < std::size(adam); ++i) *adam[i] = v[i];
    if (!d.adam) args.dscales = v[6], args.dbiases = v[7];
    return bench_run<AffineQdqBackward>(memory, preference, d, args);
  };
  return p;
}

}  // namespace

BenchProblems affine_qdq_problems(DeviceKind device) {
  BenchProblems problems;
  AffineQdqDescriptor d;
  d.rows = d.cols = kBenchExtent;
  const auto add = [&](Op op, int bits, bool packed, int64_t group_size, double target, bool adam = false) {
    d.bits = bits;
    d.packed = packed;
    d.group_size = group_size;
    d.adam = adam;
    problems.push_back(make_problem(op, d, target));
  };
  const bool cuda = device == DeviceKind::cuda;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    d.dtype = dtype;
    for (const Op op : {Op::forward, Op::backward})
      for (const bool packed : {true, false})
        for (const int64_t group_size : {32, 64, 128})
          if (cuda || group_size == 64 || (op == Op::backward && packed)) add(op, 4, packed, group_size, 0.9);
    add(Op::backward, 4, true, 100, 0);
    add(Op::backward, 3, true, 64, 0);
    add(Op::backward, 4, true, 64, 0, true);
    add(Op::backward, 4, false, 64, 0, true);
    add(Op::init, 4, true, 64, 0);
    if (cuda) {
      for (const int64_t group_size : {16, 256, 1024, 8192}) add(Op::backward, 4, true, group_size, 0);
      for (const int bits : {2, 5, 6, 8}) add(Op::backward, bits, true, 64, 0);
    } else {
      add(Op::forward, 3, true, 64, 0);
      add(Op::init, 4, false, 64, 0);
    }
  }
  return problems;
}

}  // namespace halfbyte
