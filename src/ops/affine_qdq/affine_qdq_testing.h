// For the tests of `affine_qdq`: random descriptors, tensors in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include <algorithm>
#include <array>

#include "halfbyte/affine_qdq.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

enum class AffineOp { init, qdq, backward };

// A tensor in memory of its own, between guards.
struct AffineTensor {
  static constexpr int64_t kGuard = 256;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t offset = 0;          // of the first element; in a device's memory too
  std::vector<uint8_t> bytes;  // empty: without data

  TensorView at(void* memory, Device device) const {
    return {bytes.empty() ? nullptr : static_cast<uint8_t*>(memory) + offset, dtype, shape, {}, device};
  }
  int64_t num_bytes() const { return static_cast<int64_t>(bytes.size()) - offset - kGuard; }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes.data() + offset);
  }
};

// One run of an operation: what it reads is filled, what it writes is poisoned.
struct AffineCase {
  AffineOp op = AffineOp::init;
  AffineQdqDescriptor descriptor;
  AdamStep adam;
  AffineTensor dense, codes, scales,
      biases;  // dense: w, y or dy; with adam scales and biases are the masters
  AffineTensor dscales, dbiases, scale_m, scale_v, bias_m, bias_v;

  static constexpr int kTensors = 10;
  std::array<AffineTensor*, kTensors> all() {
    return {&dense, &codes, &scales, &biases, &dscales, &dbiases, &scale_m, &scale_v, &bias_m, &bias_v};
  }
  static constexpr std::array<const char*, kTensors> kNames = {
      "dense", "codes", "scales", "biases", "dscales", "dbiases", "scale_m", "scale_v", "bias_m", "bias_v"};
  std::string text() const {
    const AffineQdqDescriptor& d = descriptor;
    return fmt::format("op {} [{}, {}] {} bits{}, {} levels, group {} {} scale {} {}{}{}{} align {} step {}",
                       static_cast<int>(op), d.rows, d.cols, d.bits, d.packed ? " packed" : "",
                       d.num_levels(), d.group_size, to_string(d.dtype), to_string(d.scale_dtype),
                       to_string(d.scale_rule), d.rounding == AffineRounding::half_away ? " half away" : "",
                       d.refit ? " refit" : "", d.adam ? " adam" : "", d.alignment, adam.step);
  }
};

class AffineCases {
 public:
  explicit AffineCases(uint64_t seed) : random_(seed) {}

  // Matrices of at most about `most` elements.
  AffineCase next(int64_t most) {
    AffineCase result;
    result.op = static_cast<AffineOp>(below(3));
    AffineQdqDescriptor& d = result.descriptor;
    d.cols = pick<int64_t>({0, 1, 7, 16, 64, 100, 128, 200, 256, 512, 1000, 1024, 2048, below(300) + 1});
    d.cols = std::min(d.cols, most);
    d.rows = d.cols == 0 ? 3 : below(std::max<int64_t>(1, most / d.cols)) + (below(16) == 0 ? 0 : 1);
    d.group_size =
        pick<int64_t>({1, 2, 7, 8, 16, 32, 64, 100, 128, 256, 512, 1024, 5000, below(40) + 1, d.cols + 1});
    if (below(2) && d.cols > d.group_size) d.cols = d.cols / d.group_size * d.group_size;
    d.bits = pick({2, 3, 4, 5, 6, 8});
    if (below(3) == 0) d.n_bins = static_cast<int>(2 + below((1 << d.bits) - 1));
    d.packed = below(3) > 0;
    d.dtype = pick({DType::f32, DType::f16, DType::bf16});
    d.scale_dtype = pick({DType::f32, DType::f16, DType::bf16});
    d.scale_rule = pick({ScaleRule::minmax, ScaleRule::mlx_edge});
    d.rounding = pick({AffineRounding::half_even, AffineRounding::half_away});
    d.refit = below(2) != 0;
    d.adam = below(2) != 0;
    d.alignment = below(4) ? 16 : size_of(d.dtype);
    result.adam.step = 1 + below(300);
    fill(result);
    return result;
  }

  // Memory for the tensors of a descriptor that is set.
  void fill(AffineCase& result) {
    for (AffineTensor* tensor : result.all()) *tensor = {};
    const AffineQdqDescriptor& d = result.descriptor;
    const auto scale_shape = d.scale_shape();
    const int64_t alignment = d.alignment;
    const bool init = result.op == AffineOp::init, backward = result.op == AffineOp::backward;
    result.dense = tensor(d.dtype, {d.rows, d.cols}, alignment);
    if (result.op != AffineOp::qdq) set_values(result.dense);
    result.codes = tensor(DType::u8, d.code_shape(),
                          result.op == AffineOp::qdq ? alignment
                          : below(3)                 ? 16
                                                     : 1);
    if (!init && !result.codes.bytes.empty())
      for (int64_t i = 0; i < result.codes.num_bytes(); ++i)
        result.codes.data<uint8_t>()[i] = static_cast<uint8_t>(random_());
    const int64_t absent = below(4);  // either gradient, both with adam
    if (backward && absent != 0 && (!d.adam || absent != 1))
      result.dscales = tensor(DType::f32, scale_shape, 4);
    if (backward && (d.adam ? absent > 1 : absent != 1)) result.dbiases = tensor(DType::f32, scale_shape, 4);
    if (backward && !d.adam) return;
    const DType dtype = backward ? DType::f32 : d.scale_dtype;
    for (AffineTensor* parameters : {&result.scales, &result.biases}) {
      *parameters = tensor(dtype, scale_shape, size_of(dtype));
      if (!init) set_parameters(*parameters, false);
    }
    if (!backward) return;
    for (AffineTensor* moments : {&result.scale_m, &result.scale_v, &result.bias_m, &result.bias_v}) {
      *moments = tensor(DType::f32, scale_shape, 4);
      set_parameters(*moments, moments == &result.scale_v || moments == &result.bias_v);
    }
  }

  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

 private:
  template <class T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }

  AffineTensor tensor(DType dtype, std::vector<int64_t> shape, int64_t alignment) {
    AffineTensor result;
    result.dtype = dtype;
    result.shape = std::move(shape);
    const int64_t num_bytes = contiguous_bytes(dtype, result.shape);
    result.offset = AffineTensor::kGuard + (alignment >= 16 ? 0 : alignment * below(5));
    if (num_bytes > 0)
      result.bytes.assign(static_cast<size_t>(result.offset + num_bytes + AffineTensor::kGuard),
                          Parts::kPoison);
    return result;
  }
  void set_values(AffineTensor& to) {
    if (to.bytes.empty()) return;
    const int64_t size = size_of(to.dtype), n = to.num_bytes() / size;
    Values values = random_values(to.dtype, n, random_());
    if (below(3) == 0)
      for (int64_t k = 0; k < 1 + n / 50; ++k) {
        Values bad;
        bad.dtype = to.dtype;
        bad.push_back(pick<double>({NAN, INFINITY, -INFINITY}));
        std::copy(bad.bytes.begin(), bad.bytes.end(), values.bytes.begin() + below(n) * size);
      }
    std::copy(values.bytes.begin(), values.bytes.end(), to.data<uint8_t>());
  }
  void set_parameters(AffineTensor& to, bool positive) {
    if (to.bytes.empty()) return;
    Values values;
    values.dtype = to.dtype;
    for (int64_t i = 0; i < to.num_bytes() / size_of(to.dtype); ++i) {
      const double value =
          std::exp2(static_cast<double>(below(12)) - 12) * (static_cast<double>(below(201)) / 100 - 1);
      values.push_back(positive ? std::fabs(value) : value);
    }
    std::copy(values.bytes.begin(), values.bytes.end(), to.data<uint8_t>());
  }

  std::mt19937_64 random_;
};

template <class Op>
QuantizeStatus run_affine(const AffineCase& test, const typename Op::Args& args, Device device,
                          void* workspace, void* stream, const PlanPreference& preference) {
  const auto plan = Plan<Op>::select(device, test.descriptor, preference);
  EXPECT_GT(plan.workspace_size(), 0);
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  if (workspace == nullptr) {
    const Memory own(device, plan.workspace_size());
    std::memset(own.data(), Parts::kPoison, static_cast<size_t>(own.num_bytes()));
    plan.run(stream, own, args);
    return plan.status(stream, own);
  }
  EXPECT_LE(plan.workspace_size(), 256);
  plan.run(stream, {workspace, 256}, args);
  return plan.status(stream, {workspace, 256});
}

using AffineMemory = std::array<void*, AffineCase::kTensors>;
inline AffineMemory host_memory(AffineCase& test) {
  AffineMemory memory{};
  size_t i = 0;
  for (AffineTensor* tensor : test.all()) memory[i++] = tensor->bytes.data();
  return memory;
}

struct AffineArgs {
  AffineInit::Args init;
  AffineQdq::Args qdq;
  AffineQdqBackward::Args backward;
};
inline AffineArgs args_of(const AffineCase& test, const AffineMemory& memory, Device device) {
  const TensorView dense = test.dense.at(memory[0], device), codes = test.codes.at(memory[1], device),
                   scales = test.scales.at(memory[2], device), biases = test.biases.at(memory[3], device);
  return {{dense, codes, scales, biases},
          {codes, scales, biases, dense},
          {codes, dense, test.dscales.at(memory[4], device), test.dbiases.at(memory[5], device), scales,
           biases, test.scale_m.at(memory[6], device), test.scale_v.at(memory[7], device),
           test.bias_m.at(memory[8], device), test.bias_v.at(memory[9], device), test.adam}};
}

// Runs the case with tensors at `memory`, in the order of all(), and a workspace of 256 bytes, or one of its
// own.
inline QuantizeStatus run_affine(const AffineCase& test, const AffineMemory& memory, Device device,
                                 void* workspace, void* stream = nullptr,
                                 const PlanPreference& preference = {}) {
  const AffineArgs args = args_of(test, memory, device);
  switch (test.op) {
    case AffineOp::init:
      return run_affine<AffineInit>(test, args.init, device, workspace, stream, preference);
    case AffineOp::qdq:
      return run_affine<AffineQdq>(test, args.qdq, device, workspace, stream, preference);
    case AffineOp::backward:
      break;
  }
  return run_affine<AffineQdqBackward>(test, args.backward, device, workspace, stream, preference);
}
inline QuantizeStatus run_on_cpu(AffineCase& test, int num_threads = 0) {
  return run_affine(test, host_memory(test), Device{}, nullptr, nullptr, {num_threads});
}

}  // namespace halfbyte::testing
