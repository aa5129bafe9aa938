// For the tests of fake quantization: random descriptors, tensors in poisoned memory, plans on the CPU beside
// plans on a device.
#pragma once

#include "grouped/testing.h"
#include "halfbyte/fake_quantize.hpp"

namespace halfbyte::testing {

// One run, forward or backward: what it reads is filled, what it writes is poisoned.
struct FakeCase {
  bool forward = true;
  bool in_place = false;  // y holds x, or dx dy
  FakeQuantizeDescriptor descriptor;
  Storage x, mask, dy, scale, zero_point, min, max, num_batches, y, global_scale;

  static constexpr std::array kNames = {"x",   "mask", "dy",          "scale", "zero_point",
                                        "min", "max",  "num_batches", "y",     "global_scale"};
  std::array<Storage*, 10> all() {
    return {&x, &mask, &dy, &scale, &zero_point, &min, &max, &num_batches, &y, &global_scale};
  }
  std::string text() const {
    const FakeQuantizeDescriptor& d = descriptor;
    return fmt::format(
        "{}{} shape [{}] {} axis {} group {} {} [{}, {}] {} scale {} zero {} {}{}{} {} eps {} mask {} align "
        "{}",
        forward ? "forward" : "backward", in_place ? " in place" : "", fmt::join(d.shape, ", "),
        to_string(d.granularity), d.axis, d.group_size, d.format ? info(*d.format).name : "integer", d.q_min,
        d.q_max, to_string(d.dtype), to_string(d.scale_dtype),
        d.zero_point_dtype ? to_string(*d.zero_point_dtype) : "none", d.computed ? "computed" : "given",
        d.observer ? d.observer->kind == ObserverKind::min_max ? " observed" : " averaged" : "",
        d.computed_global_scale ? " with the global scale" : "", to_string(d.scale_rule), d.eps, d.mask,
        d.alignment);
  }
};

class FakeCases : RandomCases {
 public:
  explicit FakeCases(uint64_t seed) : RandomCases(seed) {}

  // Shapes of at most about `most` elements.
  FakeCase next(int64_t most) {
    FakeCase result;
    result.forward = random_() % 3 != 0;
    result.in_place = random_() % 3 == 0;
    FakeQuantizeDescriptor& d = result.descriptor;
    set_groups(d, most);
    d.dtype = kFloatDTypes[random_() % 4];
    d.scale_dtype = random_() % 2 ? d.dtype : DType::f32;
    d.computed = result.forward && random_() % 2;
    if (random_() % 3 == 0) {
      d.format = pick_table();
      if (*d.format == Format::lut4) d.table = tables()[random_() % tables().size()];
    } else {
      const int bits = static_cast<int>(2 + below(7)), low = random_() % 3 == 0 ? 0 : -(1 << (bits - 1));
      d.q_min = low;
      d.q_max = low + (1 << bits) - 1;
      if (random_() % 4 == 0) ++d.q_min;  // [-127, 127]
      if (random_() % 2) d.zero_point_dtype = d.computed || random_() % 2 ? DType::i32 : d.state_dtype();
      if (!d.zero_point_dtype) d.q_min = std::min(d.q_min, 0);
      if (d.zero_point_dtype && random_() % 8 == 0 && d.q_min < 0) d.q_max += -128 - d.q_min, d.q_min = -128;
      d.scale_rule = pick({ScaleRule::absmax, ScaleRule::half_range});
    }
    if (d.format) d.scale_rule = ScaleRule::absmax;
    d.mask = random_() % 2;
    if (d.computed) {
      if (random_() % 4 == 0) d.eps = pick<double>({0x1p-23, 1e-3, 1e-30});
      if (random_() % 2) {
        d.observer.emplace();
        d.observer->kind = pick({ObserverKind::min_max, ObserverKind::moving_average});
        d.observer->momentum = pick<double>({0.99, 0.5, 0.1});
      }
    }
    d.alignment = random_() % 4 ? 16 : size_of(d.dtype);
    if (result.forward && !d.shape.empty() && random_() % 3 == 0) make_block_floats(d);
    fill(result);
    return result;
  }

  // Groups are along d.axis.
  void make_block_floats(FakeQuantizeDescriptor& d) {
    const FormatInfo& format = info(pick({Format::nvfp4, Format::mxfp4}));
    d.format = format.format;
    d.granularity = Granularity::group;
    d.group_size = format.group_size;
    d.scale_dtype = *format.scale_dtype;
    d.zero_point_dtype = {};
    d.scale_rule = ScaleRule::absmax;
    d.eps = 0;
    d.observer.reset();
    d.mask = false;
    d.computed_global_scale = d.computed && format.format == Format::nvfp4 && random_() % 2;
  }

  // Memory for the tensors of a descriptor that is set.
  void fill(FakeCase& result) {
    const FakeQuantizeDescriptor& d = result.descriptor;
    const bool masked = !result.forward && d.mask;
    result.y = storage(d.dtype, d.shape, d.alignment);
    if (!masked) result.x = values(d);
    if (!result.forward) result.dy = values(d);
    if (result.in_place) {
      Storage& in = result.forward ? result.x : result.dy;
      result.y = in;
      in = {};
    }
    if (d.mask) {
      result.mask = storage(DType::u8, d.mask_shape(), 1);
      if (masked)
        for (uint8_t& byte : result.mask.bytes) byte = static_cast<uint8_t>(random_());
    }
    if (!masked) parameters(result);
  }

 private:
  static const std::vector<std::array<float, 16>>& tables() {
    static const std::vector<std::array<float, 16>> values = {
        {-7, -5, -3.5f, -3, -2.25f, -2, -1, -0.125f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6},
        {-1, -0.9f, -0.8f, -0.7f, -0.6f, -0.5f, -0.4f, -0.3f, 0, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f, 0.9f},
        {1e-3f, 2e-3f, 3e-3f, 4e-3f, 5e-3f, 6e-3f, 7e-3f, 8e-3f, 9e-3f, 0.25f, 0.5f, 0.75f, 1, 2, 3, 8}};
    return values;
  }

  Storage values(const FakeQuantizeDescriptor& d) {
    Storage result = storage(d.dtype, d.shape, d.alignment);
    if (result.bytes.empty()) return result;
    const int64_t n = num_elements(result.view);
    put(result, 0, random_values(d.dtype, n, random_()));
    if (random_() % 3 == 0)  // NaN, of some payload, and infinities
      for (int64_t k = 0; k < 1 + n / 50; ++k) {
        const int64_t index = below(n);
        put(result, index, pick<double>({NAN, INFINITY, -INFINITY}));
        result.data()[index * size_of(d.dtype)] |= static_cast<uint8_t>(random_() % 4);
      }
    return result;
  }
  void parameters(FakeCase& result) {
    const FakeQuantizeDescriptor& d = result.descriptor;
    const std::vector<int64_t> shape = d.scale_shape();
    result.scale = storage(d.scale_dtype, shape, size_of(d.scale_dtype));
    if (d.zero_point_dtype)
      result.zero_point = storage(*d.zero_point_dtype, shape, size_of(*d.zero_point_dtype));
    const int64_t n = num_elements(result.scale.view);
    if (d.observer) {
      result.min = storage(d.state_dtype(), shape, size_of(d.state_dtype()));
      result.max = storage(d.state_dtype(), shape, size_of(d.state_dtype()));
      result.num_batches = storage(DType::i64, {}, 8);
      const bool fresh = random_() % 2;
      const int64_t batches = fresh ? 0 : 3;
      std::memcpy(result.num_batches.data(), &batches, 8);
      for (int64_t i = 0; i < n; ++i) {
        const bool none = fresh || random_() % 8 == 0, broken = !fresh && random_() % 16 == 0;
        const double low = static_cast<double>(below(2000)) / 1e4 - 0.15;
        put(result.min, i, none ? INFINITY : low);
        put(result.max, i,
            none     ? -INFINITY
            : broken ? INFINITY
                     : low + static_cast<double>(below(100)) / 700);
      }
    }
    const bool any = random_() % 4 == 0;
    if (d.format == Format::nvfp4) {
      result.global_scale = storage(DType::f32, {1}, 4);
      if (!d.computed_global_scale)
        put(result.global_scale, 0,
            any ? pick<double>({0.0, -0.0, -3.0, NAN, INFINITY, 1e-42, 0x1p-126, 1e-37, 1e37, 3e38})
                : pick<double>({1.0, 0.37, 896.0, 30000.0, 1e6}));
    }
    if (d.computed) return;
    if (size_of(d.scale_dtype) == 1) {
      for (int64_t i = 0; i < n; ++i)
        result.scale.data()[i] = static_cast<uint8_t>(any ? random_() : 0x58 + random_() % 0x26);
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      put(result.scale, i, scale(any));
      if (d.zero_point_dtype) put_zero_point(result.zero_point, i, d.q_min, d.q_max, any);
    }
  }
};

inline QuantizeStatus run_case(const FakeCase& test, const std::array<void*, 10>& memory, Device device,
                               void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                               const PlanPreference& preference = {}) {
  const TensorView y = test.y.at(memory[8], device), mask = test.mask.at(memory[1], device),
                   scale = test.scale.at(memory[3], device), zero = test.zero_point.at(memory[4], device);
  const bool in_place = test.in_place;
  const TensorView x = in_place && test.forward ? y : test.x.at(memory[0], device);
  if (!test.forward) {
    const TensorView dy = in_place ? y : test.dy.at(memory[2], device);
    return run_plan<FakeQuantizeBackward>(test.descriptor, {x, mask, dy, scale, zero, y}, device, workspace,
                                          workspace_bytes, stream, preference);
  }
  return run_plan<FakeQuantize>(
      test.descriptor,
      {x, y, scale, zero, mask, test.min.at(memory[5], device), test.max.at(memory[6], device),
       test.num_batches.at(memory[7], device), test.global_scale.at(memory[9], device)},
      device, workspace, workspace_bytes, stream, preference);
}

}  // namespace halfbyte::testing
