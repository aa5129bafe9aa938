// For the tests of the plan of `compute_qparams`: random ranges, on the CPU beside a device.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "halfbyte/observe.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

// The tensors lie one behind the other between poison: min, max, scale, zero points.
struct QParamsCase {
  static constexpr uint8_t kPoison = 0xA5;
  static constexpr int64_t kGuard = 64;
  QParamsDescriptor descriptor;
  std::vector<uint8_t> bytes;
  std::array<int64_t, 4> at{};

  int64_t n() const { return contiguous_bytes(DType::u8, descriptor.shape); }
  std::array<DType, 4> dtypes() const {
    return {descriptor.dtype, descriptor.dtype, descriptor.scale_dtype,
            descriptor.zero_point_dtype.value_or(DType::u8)};
  }
  void allocate() {
    int64_t end = kGuard;
    for (size_t i = 0; i < 4; ++i) {
      at[i] = end;
      end += (contiguous_bytes(dtypes()[i], descriptor.shape) + kGuard + 7) / 8 * 8;
    }
    bytes.assign(static_cast<size_t>(end), kPoison);
  }
  // `memory`: of all bytes.
  ComputeQParams::Args args(void* memory, Device device) const {
    const auto view = [&](size_t i) {
      return TensorView{static_cast<uint8_t*>(memory) + at[i], dtypes()[i], descriptor.shape, {}, device};
    };
    return {view(0), view(1), view(2), descriptor.zero_point_dtype ? view(3) : TensorView{}};
  }
  double value(size_t tensor, int64_t index) const {
    const uint8_t* const data = bytes.data() + at[tensor];
    switch (dtypes()[tensor]) {
      case DType::i32:
        return reinterpret_cast<const int32_t*>(data)[index];
      case DType::i8:
        return reinterpret_cast<const int8_t*>(data)[index];
      case DType::u8:
        return data[index];
      default:
        return formats::load_scale<double>(data, index, scale_type(dtypes()[tensor]));
    }
  }
  std::pair<double, double> range(int64_t index) const { return {value(0, index), value(1, index)}; }
  // Zero point 0 where there are none.
  std::pair<double, int> result(int64_t index) const {
    return {value(2, index), descriptor.zero_point_dtype ? static_cast<int>(value(3, index)) : 0};
  }
  bool guards_intact() const {
    for (size_t i = 0; i < 4; ++i) {
      const int64_t size =
          i == 3 && !descriptor.zero_point_dtype ? 0 : contiguous_bytes(dtypes()[i], descriptor.shape);
      for (int64_t k = 0; k < kGuard; ++k)
        if (bytes[static_cast<size_t>(at[i] + size + k)] != kPoison) return false;
    }
    return true;
  }
  std::string text() const {
    const QParamsDescriptor& d = descriptor;
    return fmt::format("[{}] q [{}, {}] {}{} eps {} {} scale {} zero {} ", n(), d.config.q_min,
                       d.config.q_max, d.config.asymmetric ? "asymmetric " : "",
                       to_string(d.config.scale_rule), d.config.eps, to_string(d.dtype),
                       to_string(d.scale_dtype),
                       d.zero_point_dtype ? to_string(*d.zero_point_dtype) : "none");
  }
};

class QParamsCases {
 public:
  explicit QParamsCases(uint64_t seed) : random_(seed) {}

  QParamsCase next(int64_t most) {
    QParamsCase result;
    QParamsDescriptor& d = result.descriptor;
    d.shape = {below(most + 1)};
    d.dtype = random_() % 3 ? DType::f32 : DType::f64;
    d.scale_dtype = pick({DType::f32, DType::f16, DType::bf16, d.dtype});
    QParamsConfig& config = d.config;
    const bool is_unsigned = random_() % 2 == 0;
    const int low = is_unsigned ? 0 : -128;
    config.q_min = low + (random_() % 2 ? 0 : static_cast<int>(below(120)));
    config.q_max = config.q_min + 2 + static_cast<int>(below(low + 254 - config.q_min));
    if (random_() % 2) config.q_max = low + 255;
    config.asymmetric = random_() % 2 == 0 || config.q_max <= 0;
    config.scale_rule =
        config.asymmetric ? ScaleRule::minmax : pick({ScaleRule::absmax, ScaleRule::half_range});
    config.eps = pick({0.0, 0x1p-23, 1e-3});
    d.zero_point_dtype = random_() % 2 ? DType::i32 : is_unsigned ? DType::u8 : DType::i8;
    if (!config.asymmetric && !is_unsigned && config.q_min < 0 && random_() % 2) d.zero_point_dtype.reset();
    result.allocate();
    for (int64_t i = 0; i < result.n(); ++i) {
      const double magnitude = std::exp2(static_cast<double>(below(60)) - 40);
      const double a = (static_cast<double>(below(2001)) - 1000) * magnitude,
                   b = (static_cast<double>(below(2001)) - 1000) * magnitude;
      double min = std::min(a, b), max = std::max(a, b);
      switch (below(12)) {
        case 0:
          min = INFINITY, max = -INFINITY;
          break;
        case 1:
          min = pick<double>({NAN, -INFINITY, 1});
          max = pick<double>({NAN, INFINITY, 0});
          break;
        case 2:
          min = max = 0;
          break;
        case 3:
          min = -3e38, max = 3e38;
          break;
        case 4:
          min = max = 1e-44;
          break;
        default:
          break;
      }
      set(result, 0, i, min);
      set(result, 1, i, max);
    }
    return result;
  }

 private:
  template <class T>
  T pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  static void set(QParamsCase& test, size_t tensor, int64_t index, double value) {
    uint8_t* const data = test.bytes.data() + test.at[tensor];
    if (test.descriptor.dtype == DType::f64)
      reinterpret_cast<double*>(data)[index] = value;
    else
      reinterpret_cast<float*>(data)[index] = static_cast<float>(value);
  }

  std::mt19937_64 random_;
};

inline QuantizeStatus run_qparams_on_cpu(QParamsCase& test, const PlanPreference& preference = {}) {
  const auto plan = ComputeQParamsPlan::select({}, test.descriptor, preference);
  const ComputeQParams::Args args = test.args(test.bytes.data(), {});
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  alignas(16) QuantizeStatus workspace;
  plan.run(nullptr, {&workspace, sizeof workspace}, args);
  return plan.status(nullptr, {&workspace, sizeof workspace});
}

}  // namespace halfbyte::testing
