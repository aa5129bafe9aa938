#include "benchmark/problem.h"
#include "halfbyte/quantize_linear.hpp"

namespace halfbyte {
namespace {

enum class Op { quantize, dequantize, backward };

BenchProblem make_problem(Op op, const char* grouping, const LinearDescriptor& d, double target) {
  BenchProblem p;
  constexpr const char* kNames[] = {"quantize_linear", "dequantize_linear", "quantize_linear_backward"};
  p.op = kNames[static_cast<int>(op)];
  p.name = std::string(d.computed ? "computed " : "") + grouping + " " + to_string(d.dtype) + " " +
           to_string(d.code_dtype) + (d.zero_point_dtype ? " zero point" : "");
  p.dtype = d.dtype;
  p.target = target;
  const std::vector<int64_t> groups = d.scale_shape();
  const BenchFill dense_fill{BenchFill::normal, d.dtype};
  const bool decodes = op == Op::dequantize, backward = op == Op::backward;
  const int64_t dense = contiguous_bytes(d.dtype, d.shape);
  const size_t x = p.add(decodes ? 0 : dense, dense_fill), dy = p.add(backward ? dense : 0, dense_fill),
               y = p.add(decodes || backward ? dense : 0),
               codes = p.add(backward ? 0 : contiguous_bytes(d.code_dtype, d.shape),
                             {decodes ? BenchFill::random : BenchFill::poison});
  const auto parameter = [&](std::optional<DType> dtype, double low, double high) {
    const BenchFill fill{BenchFill::uniform, dtype.value_or(DType::u8), low, high};
    return p.add(dtype ? contiguous_bytes(*dtype, groups) : 0, d.computed ? BenchFill() : fill);
  };
  const size_t scale = parameter(d.scale_dtype, 5e-4, 1e-3),
               zero = parameter(d.zero_point_dtype, d.code_dtype == DType::i4 ? 0 : 112, 127);
  if (backward)
    p.reads({x, dy, scale, zero}), p.writes({y});
  else if (decodes)
    p.reads({codes, scale, zero}), p.writes({y});
  else if (d.computed)
    p.reads({x}), p.writes({codes, scale, zero});
  else
    p.reads({x, scale, zero}), p.writes({codes});
  p.bind = [=](const BenchMemory& memory, const PlanPreference& preference) {
    const TensorView source = memory.view(x, d.dtype, d.shape), result = memory.view(y, d.dtype, d.shape),
                     code = memory.view(codes, d.code_dtype, d.shape),
                     scales = memory.view(scale, d.scale_dtype, groups);
    TensorView zeros;
    if (d.zero_point_dtype) zeros = memory.view(zero, *d.zero_point_dtype, groups);
    if (decodes) return bench_run<DequantizeLinear>(memory, preference, d, {code, scales, zeros, result});
    if (!backward) return bench_run<QuantizeLinear>(memory, preference, d, {source, code, scales, zeros});
    return bench_run<QuantizeLinearBackward>(
        memory, preference, d, {source, memory.view(dy, d.dtype, d.shape), scales, zeros, result});
  };
  return p;
}

}  // namespace

BenchProblems quantize_linear_problems(DeviceKind device) {
  BenchProblems problems;
  const std::vector<int64_t> shape = {kBenchExtent, kBenchExtent};
  const auto add = [&](Op op, const char* name, LinearDescriptor d, DType code, bool asymmetric,
                       double target, DType dtype = DType::bf16) {
    d.dtype = dtype;
    d.code_dtype = code;
    if (code == DType::u8) d.q_min = 0, d.q_max = 255;
    if (code == DType::i4) d.q_min = -8, d.q_max = 7;
    if (asymmetric) d.zero_point_dtype = op == Op::backward ? DType::i32 : code;
    problems.push_back(make_problem(op, name, d, target));
  };
  const auto computed = [](LinearDescriptor d) {
    d.computed = true;
    return d;
  };
  const auto tensor = LinearDescriptor::per_tensor(shape), channel = LinearDescriptor::per_channel(shape, 0),
             column = LinearDescriptor::per_channel(shape, 1), group = LinearDescriptor::per_group(shape, 64),
             group32 = LinearDescriptor::per_group(shape, 32),
             group128 = LinearDescriptor::per_group(shape, 128),
             rows = LinearDescriptor::per_group(shape, 64, 0),
             rows128 = LinearDescriptor::per_group(shape, 128, 0), token = LinearDescriptor::per_token(shape);
  if (device == DeviceKind::cpu) {
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const DType code : {DType::i8, DType::i4}) {
        for (const Op op : {Op::quantize, Op::dequantize, Op::backward}) {
          if (op == Op::backward && code == DType::i4) continue;
          add(op, "tensor", tensor, code, true, 0, dtype);
          add(op, "channel", channel, code, true, 0, dtype);
          add(op, "channel axis 1", column, code, true, 0, dtype);
          add(op, "group 128", group128, code, true, 0, dtype);
          add(op, "group 32", group32, code, true, 0, dtype);
          add(op, "group 128 axis 0", rows128, code, true, 0, dtype);
        }
        add(Op::quantize, "tensor", computed(tensor), code, true, 0, dtype);
        add(Op::quantize, "channel axis 1", computed(column), code, true, 0, dtype);
        add(Op::quantize, "group 128", computed(group128), code, true, 0, dtype);
        add(Op::quantize, "token", computed(token), code, true, 0, dtype);
      }
    return problems;
  }
  constexpr double kTarget = 0.9;
  for (const Op op : {Op::quantize, Op::dequantize, Op::backward})
    for (const bool asymmetric : {false, true}) {
      const DType code = asymmetric ? DType::u8 : DType::i8;
      add(op, "tensor", tensor, code, asymmetric, kTarget);
      add(op, "channel", channel, code, asymmetric, kTarget);
      add(op, "group 64", group, code, asymmetric, kTarget);
      add(op, "channel axis 1", column, code, asymmetric, 0);
      add(op, "group 64 axis 0", rows, code, asymmetric, 0);
      if (op != Op::backward) add(op, "group 64", group, DType::i4, asymmetric, 0);
    }
  for (const bool asymmetric : {false, true}) {
    const DType code = asymmetric ? DType::u8 : DType::i8;
    add(Op::quantize, "group 64", computed(group), code, asymmetric, kTarget);
    add(Op::quantize, "group 128", computed(group128), code, asymmetric, kTarget);
    add(Op::quantize, "token", computed(token), code, asymmetric, kTarget);
    add(Op::quantize, "tensor", computed(tensor), code, asymmetric, 0);
    add(Op::quantize, "channel axis 1", computed(column), code, asymmetric, 0);
    add(Op::quantize, "group 64 axis 0", computed(rows), code, asymmetric, 0);
  }
  add(Op::quantize, "group 64", computed(group), DType::i4, false, 0);
  add(Op::quantize, "tensor", tensor, DType::i8, false, 0, DType::f32);
  add(Op::quantize, "token", computed(token), DType::i8, false, 0, DType::f32);
  add(Op::quantize, "tensor", tensor, DType::i8, false, 0, DType::f64);
  return problems;
}

}  // namespace halfbyte
