// For the tests of `observe`: random descriptors, data and states in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include <algorithm>
#include <array>

#include "halfbyte/observe.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

// A tensor in memory of its own, between poison.
struct ObserveTensor {
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr int64_t kGuard = 256;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t offset = kGuard;  // bytes before its first element
  std::vector<uint8_t> bytes;

  ObserveTensor() = default;
  ObserveTensor(DType of, std::vector<int64_t> extents, const void* data, int64_t shift = 0)
      : dtype(of), shape(std::move(extents)), offset(kGuard + shift) {
    const int64_t n = num_bytes();
    bytes.assign(static_cast<size_t>(offset + n + kGuard), kPoison);
    if (n > 0) std::memcpy(bytes.data() + offset, data, static_cast<size_t>(n));
  }
  int64_t num_bytes() const { return contiguous_bytes(dtype, shape); }
  // `memory`: of all bytes.
  TensorView at(void* memory, Device device) const {
    return {static_cast<uint8_t*>(memory) + offset, dtype, shape, {}, device};
  }
};

struct ObserveCase {
  ObserveDescriptor descriptor;
  ObserveTensor x, min, max, num_batches;

  std::array<ObserveTensor*, 4> all() { return {&x, &min, &max, &num_batches}; }
  std::string text() const {
    const ObserveDescriptor& d = descriptor;
    return fmt::format("shape [{}] {} axis {} group {} {} {} align {} batches {}", fmt::join(d.shape, ", "),
                       to_string(d.granularity), d.axis, d.group_size, to_string(d.dtype),
                       to_string(d.observer.kind), d.alignment,
                       num_batches.bytes[static_cast<size_t>(num_batches.offset)]);
  }
};

class ObserveCases {
 public:
  explicit ObserveCases(uint64_t seed) : random_(seed) {}

  // Shapes of at most about `most` elements.
  ObserveCase next(int64_t most) {
    ObserveCase result;
    ObserveDescriptor& d = result.descriptor;
    d.shape = shape(most);
    d.granularity = d.shape.empty() ? Granularity::tensor
                                    : pick({Granularity::tensor, Granularity::channel, Granularity::group});
    const int rank = static_cast<int>(d.shape.size());
    if (rank > 0) d.axis = static_cast<int>(random_() % (2 * d.shape.size())) - rank;
    if (rank > 0 && random_() % 2) d.axis = -1;
    if (d.granularity == Granularity::group)
      d.group_size =
          pick<int64_t>({1, 7, 8, 16, 32, 64, 100, 128, 256, 1000, below(40) + 1, d.shape.back() + 1});
    d.dtype = kFloatDTypes[random_() % 4];
    d.alignment = random_() % 4 ? 16 : size_of(d.dtype);
    d.observer.kind = pick({ObserverKind::min_max, ObserverKind::moving_average});
    d.observer.momentum = pick({0.99, 0.9, 0.5, 0.3});
    fill(result);
    return result;
  }

  // Data and a state for a descriptor that is set.
  void fill(ObserveCase& result) {
    const ObserveDescriptor& d = result.descriptor;
    const int64_t n = contiguous_bytes(DType::i8, d.shape), size = size_of(d.dtype);
    Values values = random_values(d.dtype, n, random_());
    if (n > 0 && random_() % 3 == 0)
      for (int64_t k = 0; k < 1 + n / (random_() % 2 ? 50 : 2);
           ++k) {  // half of them, so that groups have none
        Values bad;
        bad.dtype = d.dtype;
        bad.push_back(pick<double>({NAN, INFINITY, -INFINITY}));
        std::copy(bad.bytes.begin(), bad.bytes.end(), values.bytes.begin() + below(n) * size);
      }
    result.x = ObserveTensor(d.dtype, d.shape, values.bytes.data(), d.alignment >= 16 ? 0 : size * below(9));
    const std::vector<int64_t> groups = d.state_shape();
    const int64_t num_groups = contiguous_bytes(DType::i8, groups);
    Values low, high;
    low.dtype = high.dtype = d.state_dtype();
    const bool first = random_() % 3 == 0;
    for (int64_t i = 0; i < num_groups; ++i) {
      const bool empty = first || random_() % 4 == 0;
      const double a = below(2000) * 1e-5 - 0.01, b = below(2000) * 1e-5 - 0.01;
      low.push_back(empty ? INFINITY : std::min(a, b));
      high.push_back(empty ? -INFINITY : std::max(a, b));
    }
    const int64_t num_batches = first ? 0 : 1 + below(100), shift = size_of(d.state_dtype()) * below(4);
    result.min = ObserveTensor(d.state_dtype(), groups, low.bytes.data(), shift);
    result.max =
        ObserveTensor(d.state_dtype(), groups, high.bytes.data(), size_of(d.state_dtype()) * below(4));
    result.num_batches = ObserveTensor(DType::i64, {}, &num_batches);
  }

 private:
  template <class T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  std::vector<int64_t> shape(int64_t most) {
    std::vector<int64_t> result(random_() % 5);
    int64_t left = most;
    for (int64_t& extent : result) {
      extent = pick<int64_t>({0, 1, 2, 3, 8, 16, 31, 32, 64, 72, 128, 200, 256, 1024, 3000, below(300) + 1});
      if (extent == 0 && random_() % 8) extent = 16;
      extent = std::min(extent, std::max<int64_t>(1, left));
      left /= std::max<int64_t>(1, extent);
    }
    std::shuffle(result.begin(), result.end(), random_);
    return result;
  }

  std::mt19937_64 random_;
};

// Runs the case with tensors in `memory`, whole storages in the order of all(). The workspace is poisoned
// before.
inline QuantizeStatus run_observe(const ObserveCase& test, const std::array<void*, 4>& memory, Device device,
                                  void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                                  const PlanPreference& preference = {}) {
  const auto plan = ObservePlan::select(device, test.descriptor, preference);
  EXPECT_LE(plan.workspace_size(), workspace_bytes);
  const Observe::Args args{test.x.at(memory[0], device), test.min.at(memory[1], device),
                           test.max.at(memory[2], device), test.num_batches.at(memory[3], device)};
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  plan.run(stream, workspace, args);
  return plan.status(workspace, stream);
}
inline QuantizeStatus run_observe_on_cpu(ObserveCase& test, const PlanPreference& preference = {}) {
  alignas(16) QuantizeStatus workspace;
  std::array<void*, 4> memory{};
  std::ranges::transform(test.all(), memory.begin(),
                         [](ObserveTensor* tensor) { return tensor->bytes.data(); });
  return run_observe(test, memory, {}, &workspace, sizeof workspace, nullptr, preference);
}

inline ::testing::AssertionResult same_tensors(ObserveCase& expected, ObserveCase& actual) {
  constexpr std::array kNames = {"x", "min", "max", "num_batches"};
  for (size_t i = 0; i < kNames.size(); ++i)
    if (expected.all()[i]->bytes != actual.all()[i]->bytes)
      return ::testing::AssertionFailure() << kNames[i] << " differs";
  return ::testing::AssertionSuccess();
}

}  // namespace halfbyte::testing
