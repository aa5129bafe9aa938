// For the tests of learned scales: random descriptors, tensors in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include <algorithm>
#include <array>

#include "grouped/testing.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte::testing {

// One run: what it reads is filled, what it writes is poisoned.
struct LsqCase {
  bool in_place = false;  // dx holds dy
  FakeQuantizeDescriptor descriptor;
  Storage x, dy, scale, zero_point, dx, dscale, dzero_point;

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

class LsqCases {
 public:
  explicit LsqCases(uint64_t seed) : random_(seed) {}

  // Shapes of at most about `most` elements.
  LsqCase next(int64_t most) {
    LsqCase result;
    result.in_place = below(3) == 0;
    FakeQuantizeDescriptor& d = result.descriptor;
    d.shape = shape(most);
    const int rank = static_cast<int>(d.shape.size());
    d.granularity = rank == 0 ? Granularity::tensor
                              : pick({Granularity::tensor, Granularity::channel, Granularity::group});
    if (rank > 0 && below(2)) d.axis = static_cast<int>(below(2 * rank)) - rank;
    d.group_size = d.granularity == Granularity::group
                       ? pick<int64_t>({1, 4, 7, 8, 16, 32, 64, 100, 128, 256, 1000, 1024, below(40) + 1})
                       : 0;
    d.dtype = kFloatDTypes[below(4)];
    d.scale_dtype = below(2) ? d.dtype : DType::f32;
    if (below(4) == 0) {
      d.format = pick({Format::nf4, Format::fp4, Format::fp4_e2m1, Format::lut4});
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
  template <class T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }

  std::vector<int64_t> shape(int64_t most) {
    std::vector<int64_t> result(random_() % 5);
    int64_t left = most;
    for (int64_t& extent : result) {
      extent = pick<int64_t>({0, 1, 2, 3, 8, 16, 31, 32, 64, 72, 128, 200, 256, 1024, 4096, below(300) + 1});
      if (extent == 0 && below(8)) extent = 16;
      extent = std::min(extent, std::max<int64_t>(1, left));
      left /= std::max<int64_t>(1, extent);
    }
    std::shuffle(result.begin(), result.end(), random_);
    return result;
  }
  Storage storage(DType dtype, const std::vector<int64_t>& shape, int64_t alignment) {
    Storage result;
    result.view.dtype = dtype;
    result.view.shape = shape;
    result.offset = 256 + (alignment >= 16 ? 0 : alignment * below(3));
    const int64_t num_bytes = contiguous_bytes(dtype, shape);
    if (num_bytes > 0)
      result.bytes.assign(static_cast<size_t>(result.offset + num_bytes + 256), Storage::kPoison);
    return result;
  }
  static void put(Storage& storage, int64_t index, const Values& values) {
    std::copy(values.bytes.begin(), values.bytes.end(),
              storage.bytes.begin() + storage.offset + index * size_of(values.dtype));
  }
  static void put(Storage& storage, int64_t index, double value) {
    Values one;
    one.dtype = storage.view.dtype;
    one.push_back(value);
    put(storage, index, one);
  }
  Storage values(const FakeQuantizeDescriptor& d, bool rare) {
    Storage result = storage(d.dtype, d.shape, d.alignment);
    const int64_t n = num_elements(result.view);
    if (n == 0) return result;
    if (rare) {
      put(result, 0, random_values(d.dtype, n, random_()));
      if (below(2))  // NaN and infinities
        for (int64_t k = 0; k < 1 + n / 200; ++k)
          put(result, below(n), pick<double>({NAN, INFINITY, -INFINITY}));
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
      double scale =
          std::exp2(static_cast<double>(below(12)) - 12) * (1 + static_cast<double>(below(100)) / 100);
      if (any)
        scale = pick<double>(
            {scale, 0.0, -scale, NAN, INFINITY, scale * 1e-37, scale * 1e37, 1e-44, scale * 1e10});
      put(result.scale, i, scale);
      if (!d.zero_point_dtype) continue;
      double zero = static_cast<double>(d.q_min + below(d.q_max - d.q_min + 1));
      if (*d.zero_point_dtype == DType::i32) {
        auto integer = static_cast<int32_t>(zero);
        if (any && below(4) == 0) integer = static_cast<int32_t>(random_());
        std::memcpy(result.zero_point.bytes.data() + result.zero_point.offset + 4 * i, &integer, 4);
      } else {
        zero += static_cast<double>(below(65)) / 64 - 0.5;
        if (any && below(4) == 0) zero = pick<double>({NAN, INFINITY, -1e30, 1e3, zero});
        put(result.zero_point, i, zero);
      }
    }
  }

  std::mt19937_64 random_;
};

// Runs the case with tensors at `memory`, in the order of all().
inline QuantizeStatus run_lsq(const LsqCase& test, const std::array<void*, 7>& memory, Device device,
                              void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                              const PlanPreference& preference = {}) {
  const auto plan = FakeQuantizeLearnedBackwardPlan::select(device, test.descriptor, preference);
  EXPECT_GT(plan.workspace_size(), 0);
  EXPECT_LE(plan.workspace_size(), workspace_bytes);
  const auto args = test.args(memory, device);
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  plan.run(stream, workspace, args);
  return plan.status(workspace, stream);
}

}  // namespace halfbyte::testing
