// For the tests of learned scales: random descriptors, tensors in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include "grouped/testing.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte::testing {

// One run: what it reads is filled, what it writes is poisoned.
struct LsqCase {
  bool in_place = false;  // dx holds dy
  FakeQuantizeDescriptor descriptor;
  Storage x, dy, scale, zero_point, dx, dscale, dzero_point;

  static constexpr std::array kNames = {"x", "dy", "scale", "zero_point", "dx", "dscale", "dzero_point"};
  std::array<Storage*, 7> all() { return {&x, &dy, &scale, &zero_point, &dx, &dscale, &dzero_point}; }
  std::string text() const {
    const FakeQuantizeDescriptor& d = descriptor;
    return fmt::format("shape [{}] {} axis {} group {} {} [{}, {}] {} scale {} zero {} factor {} align {}{}",
                       fmt::join(d.shape, ", "), to_string(d.granularity), d.axis, d.group_size,
                       d.format ? info(*d.format).name : "integer", d.q_min, d.q_max, to_string(d.dtype),
                       to_string(d.scale_dtype), d.zero_point_dtype ? to_string(*d.zero_point_dtype) : "none",
                       d.gradient_scale, d.alignment, in_place ? " in place" : "");
  }
  // The tensors at `memory`, in the order of all().
  FakeQuantizeLearnedBackward::Args args(const std::array<void*, 7>& memory, Device device) const {
    const TensorView out = dx.at(memory[4], device);
    return {x.at(memory[0], device),
            in_place ? out : dy.at(memory[1], device),
            scale.at(memory[2], device),
            zero_point.at(memory[3], device),
            out,
            dscale.at(memory[5], device),
            dzero_point.at(memory[6], device)};
  }
};

class LsqCases : RandomCases {
 public:
  explicit LsqCases(uint64_t seed) : RandomCases(seed) {}

  // Shapes of at most about `most` elements.
  LsqCase next(int64_t most) {
    LsqCase result;
    result.in_place = below(3) == 0;
    FakeQuantizeDescriptor& d = result.descriptor;
    set_groups(d, most);
    d.dtype = kFloatDTypes[below(4)];
    d.scale_dtype = below(2) ? d.dtype : DType::f32;
    if (below(4) == 0) {
      d.format = pick_table();
      if (*d.format == Format::lut4)
        d.table = {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    } else {
      const int bits = static_cast<int>(2 + below(7));
      d.q_min = below(3) == 0 ? 0 : -(1 << (bits - 1));
      d.q_max = d.q_min + (1 << bits) - 1;
      if (below(4) && below(4)) d.zero_point_dtype = below(3) ? d.state_dtype() : DType::i32;
    }
    d.gradient_scale = pick<double>({1, 0.015625, 0.3, 1e-3});
    d.alignment = below(4) ? 16 : size_of(d.dtype);
    fill(result);
    return result;
  }

  // Memory for the tensors of a descriptor that is set.
  void fill(LsqCase& result) {
    const FakeQuantizeDescriptor& d = result.descriptor;
    const bool rare = below(3) == 0;  // values that sums do not like
    result.x = values(d, rare || below(2));
    result.dy = values(d, rare);
    result.dx = storage(d.dtype, d.shape, d.alignment);
    if (result.in_place) std::swap(result.dx, result.dy), result.dy = {};
    const std::vector<int64_t> groups = d.scale_shape();
    result.dscale = storage(d.state_dtype(), groups, size_of(d.state_dtype()));
    if (d.zero_point_dtype == d.state_dtype()) result.dzero_point = result.dscale;
    parameters(result, groups);
  }

 private:
  Storage values(const FakeQuantizeDescriptor& d, bool rare) {
    Storage result = storage(d.dtype, d.shape, d.alignment);
    const int64_t n = num_elements(result.view);
    if (n == 0) return result;
    if (rare) {
      put(result, 0, random_values(d.dtype, n, random_()));
      if (below(2))  // NaN and infinities
        put_nonfinite(result, n, 1 + n / 200);
    } else {
      std::normal_distribution<double> normal(0, 0.02);
      Values some;
      some.dtype = d.dtype;
      for (int64_t i = 0; i < n; ++i) some.push_back(below(8) ? normal(random_) : 0.0);
      put(result, 0, some);
    }
    return result;
  }
  void parameters(LsqCase& result, const std::vector<int64_t>& groups) {
    const FakeQuantizeDescriptor& d = result.descriptor;
    result.scale = storage(d.scale_dtype, groups, size_of(d.scale_dtype));
    if (d.zero_point_dtype)
      result.zero_point = storage(*d.zero_point_dtype, groups, size_of(*d.zero_point_dtype));
    const bool any = below(4) == 0;
    for (int64_t i = 0; i < num_elements(result.scale.view); ++i) {
      put(result.scale, i, scale(any));
      if (d.zero_point_dtype) put_zero_point(result.zero_point, i, d.q_min, d.q_max, any);
    }
  }
};

inline QuantizeStatus run_case(const LsqCase& test, const std::array<void*, 7>& memory, Device device,
                               void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                               const PlanPreference& preference = {}) {
  return run_plan<FakeQuantizeLearnedBackward>(test.descriptor, test.args(memory, device), device, workspace,
                                               workspace_bytes, stream, preference);
}

}  // namespace halfbyte::testing
