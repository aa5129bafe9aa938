// For the tests of `observe`: random descriptors, data and states in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include "grouped/testing.h"
#include "halfbyte/observe.hpp"
#include "ops/observe/observe_ref.h"

namespace halfbyte::testing {

struct ObserveCase {
  ObserveDescriptor descriptor;
  Storage x, min, max, num_batches;

  static constexpr std::array kNames = {"x", "min", "max", "num_batches"};
  std::array<Storage*, 4> all() { return {&x, &min, &max, &num_batches}; }
  std::string text() const {
    const ObserveDescriptor& d = descriptor;
    return fmt::format("shape [{}] {} axis {} group {} {} {} align {} batches {}", fmt::join(d.shape, ", "),
                       to_string(d.granularity), d.axis, d.group_size, to_string(d.dtype),
                       to_string(d.observer.kind), d.alignment,
                       num_batches.bytes[static_cast<size_t>(num_batches.offset)]);
  }
};

class ObserveCases : RandomCases {
 public:
  explicit ObserveCases(uint64_t seed) : RandomCases(seed) {}

  // Shapes of at most about `most` elements.
  ObserveCase next(int64_t most) {
    ObserveCase result;
    ObserveDescriptor& d = result.descriptor;
    set_groups(d, most);
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
    const Values values = random_values(d.dtype, n, random_());
    result.x = Storage(d.dtype, d.shape, values.bytes.data(), d.alignment >= 16 ? 0 : size * below(9));
    if (n > 0 && random_() % 3 == 0)  // half of them, so that groups have none
      put_nonfinite(result.x, n, 1 + n / (random_() % 2 ? 50 : 2));
    const std::vector<int64_t> groups = d.state_shape();
    const int64_t num_groups = contiguous_bytes(DType::i8, groups);
    Values low, high;
    low.dtype = high.dtype = d.state_dtype();
    const bool first = random_() % 3 == 0, per_group = counts_per_group(d.observer.kind);
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < num_groups; ++i) {
      const bool empty = first || random_() % 4 == 0;
      const double a = below(2000) * 1e-5 - 0.01, b = below(2000) * 1e-5 - 0.01;
      counts.push_back(empty ? below(2) : 1 + below(100));  // of an empty one it does not count
      low.push_back(empty ? INFINITY : std::min(a, b));
      high.push_back(empty ? -INFINITY : std::max(a, b));
    }
    if (!per_group) counts = {first ? 0 : 1 + below(100)};
    const int64_t shift = size_of(d.state_dtype()) * below(4);
    result.min = Storage(d.state_dtype(), groups, low.bytes.data(), shift);
    result.max = Storage(d.state_dtype(), groups, high.bytes.data(), size_of(d.state_dtype()) * below(4));
    result.num_batches = Storage(DType::i64, d.count_shape(), counts.data());
  }
};

inline QuantizeStatus run_case(const ObserveCase& test, const std::array<void*, 4>& memory, Device device,
                               void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                               const PlanPreference& preference = {}) {
  return run_plan<Observe>(test.descriptor,
                           {test.x.at(memory[0], device), test.min.at(memory[1], device),
                            test.max.at(memory[2], device), test.num_batches.at(memory[3], device)},
                           device, workspace, workspace_bytes, stream, preference);
}

// The scalar reference on the tensors of a case.
inline QuantizeStatus run_reference(ObserveCase& test) {
  const ObserveProblem problem = observe_problem(test.descriptor, {}, {});
  const ObserveTensors tensors{test.x.data(), test.min.data(), test.max.data(),
                               reinterpret_cast<int64_t*>(test.num_batches.data())};
  return problem.dtype == DType::f64 ? observe_ref::run<double>(problem, tensors)
                                     : observe_ref::run<float>(problem, tensors);
}

}  // namespace halfbyte::testing
