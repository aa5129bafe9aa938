// What an op declares to be measured: problems, the arrays of each, the bytes that it moves, and the plan
// that runs it, for the CPU and CUDA alike. src/ops/<op>/<op>_bench.cc makes the tables.
#pragma once

#include <algorithm>
#include <compare>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

// What an array has before a run.
struct BenchFill {
  enum Kind : uint8_t {
    poison,   // what is only written
    normal,   // weights: of width 0.02
    random,   // bytes
    uniform,  // from low to high, integers of integer types
  };
  Kind kind = poison;
  DType dtype = DType::u8;
  double low = 0, high = 0;
  auto operator<=>(const BenchFill&) const = default;
};

// The arrays of one run.
struct BenchMemory {
  Device device;
  std::span<std::byte* const> arrays;
  std::byte* at(size_t array) const { return arrays[array]; }
  TensorView view(size_t array, DType dtype, const std::vector<int64_t>& shape) const {
    return {at(array), dtype, shape, {}, device};
  }
};

// A plan with its arguments.
struct BenchRun {
  Sku sku;
  int64_t workspace_bytes = 0;
  std::function<void(void* stream, const Workspace& workspace)> run;
};
template <class Op>
BenchRun bench_run(const BenchMemory& memory, const PlanPreference& preference,
                   const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select(memory.device, descriptor, preference);
  return {plan.sku(), plan.workspace_size(),
          [plan, args](void* stream, const Workspace& workspace) { plan.run(stream, workspace, args); }};
}

struct BenchProblem {
  std::string op, name;
  std::string format;  // of packed formats; empty: none
  DType dtype = DType::bf16;
  double target = 0;  // CUDA: the least share of a bare move of the same bytes; 0: none

  // Lie one behind the other, each at a multiple of 256 bytes, so that a bare move can read the same memory.
  struct Array {
    int64_t num_bytes = 0;
    BenchFill fill;
  };
  std::vector<Array> arrays;
  // What the op moves, and the first array that it reads.
  int64_t read_bytes = 0, write_bytes = 0;
  size_t from = 0;
  bool has_more_ceilings = false;  // is also compared with a bare read of the same, and a copy

  std::function<BenchRun(const BenchMemory&, const PlanPreference&)> bind;
  std::function<void(const BenchMemory&)> prepare;  // what fills cannot say; may be empty

  // The number of the array.
  size_t add(int64_t num_bytes, BenchFill fill = {}) {
    arrays.push_back({num_bytes, fill});
    return arrays.size() - 1;
  }
  // Arrays that are read or written, in order.
  void reads(std::initializer_list<size_t> read) { from = *read.begin(), read_bytes = bytes_of(read); }
  void writes(std::initializer_list<size_t> written) { write_bytes = bytes_of(written); }

 private:
  int64_t bytes_of(std::initializer_list<size_t> some) const {
    int64_t sum = 0;
    for (const size_t array : some) sum += arrays[array].num_bytes;
    return sum;
  }
};

// An element of a tensor to each scale: how the ops of grouped tensors are named.
struct BenchGrouping {
  const char* name;
  Granularity granularity;
  int axis;
  int64_t group_size;
};
inline constexpr BenchGrouping kBenchTensor = {"tensor", Granularity::tensor, -1, 0},
                               kBenchChannel = {"channel", Granularity::channel, 0, 0},
                               kBenchColumn = {"channel axis 1", Granularity::channel, 1, 0},
                               kBenchGroup = {"group 64", Granularity::group, -1, 64},
                               kBenchGroupRows = {"group 64 axis 0", Granularity::group, 0, 64};
// Of these ops, unless a problem says another.
inline constexpr int64_t kBenchExtent = 8192;

using BenchProblems = std::vector<BenchProblem>;
// The tables. What is worth measuring differs by device.
BenchProblems quantize_problems(DeviceKind device);
BenchProblems dequantize_problems(DeviceKind device);
BenchProblems reorder_problems(DeviceKind device);
BenchProblems quantize_linear_problems(DeviceKind device);
BenchProblems fake_quantize_problems(DeviceKind device);
BenchProblems learned_scale_problems(DeviceKind device);
BenchProblems observe_problems(DeviceKind device);
BenchProblems affine_qdq_problems(DeviceKind device);

// A quantized matrix as arrays of a problem: codes and what else the spec has, one behind the other.
struct BenchMatrix {
  QuantSpec spec;
  int64_t rows = 0, cols = 0;
  size_t codes = 0, scales = 0, zeros = 0, biases = 0, global_scale = 0;

  BenchMatrix(BenchProblem& problem, const QuantSpec& s, int64_t r, int64_t c, bool filled)
      : spec(s), rows(r), cols(c) {
    const QuantShape shape = quant_shape(s, r, c);
    const auto fill = [&](BenchFill wanted) { return filled ? wanted : BenchFill(); };
    const int64_t scale_bytes = shape.num_groups * size_of(s.scale_dtype);
    // Floating codes but NaN, whose payload is not the same on all devices.
    const bool floating = info(s.format).kind == FormatKind::floating;
    codes = problem.add(shape.code_bytes(), fill(floating ? BenchFill{BenchFill::uniform, DType::u8, 0, 0x7E}
                                                          : BenchFill{BenchFill::random}));
    scales = problem.add(scale_bytes, fill({BenchFill::uniform, s.scale_dtype, 0.005, 0.015}));
    zeros = problem.add(
        has_zeros(s) ? shape.num_groups : 0,
        fill({BenchFill::uniform, DType::u8, 0, static_cast<double>((1 << info(s.format).bits) - 1)}));
    biases =
        problem.add(has_biases(s) ? scale_bytes : 0, fill({BenchFill::uniform, s.scale_dtype, -0.1, -0.05}));
    // Given, also where the others are written; about that of values of up to 5.
    global_scale = problem.add(has_global_scale(s) ? size_of(DType::f32) : 0,
                               {BenchFill::uniform, DType::f32, 500, 550});
  }
  QuantizedView view(const BenchMemory& memory) const {
    const auto at = [&](size_t array, bool has) { return has ? memory.at(array) : nullptr; };
    return {spec,
            rows,
            cols,
            reinterpret_cast<uint8_t*>(memory.at(codes)),
            memory.at(scales),
            reinterpret_cast<uint8_t*>(at(zeros, has_zeros(spec))),
            at(biases, has_biases(spec)),
            reinterpret_cast<float*>(at(global_scale, has_global_scale(spec)))};
  }
};
// The specifications of packed formats that are measured: quantized and decoded; a name each.
struct BenchSpec {
  std::string name;
  QuantSpec spec;
  double target;
  DType dtype;
  int64_t rows;
  Encoding encoding = {};  // of quantize
};
std::vector<BenchSpec> bench_specs_cuda();
std::string bench_name(const BenchSpec& test);

}  // namespace halfbyte
