// For the tests of linear quantization: random descriptors, tensors of any strides in poisoned memory, plans
// on the CPU beside plans on a device.
#pragma once

#include <algorithm>
#include <array>

#include "grouped/linear_args.h"
#include "grouped/testing.h"
#include "halfbyte/quantize_linear.hpp"

namespace halfbyte::testing {

// One run of an operation: what it reads is filled, what it writes is poisoned.
struct LinearCase {
  LinearOp op = LinearOp::quantize;
  LinearDescriptor descriptor;
  Storage x, dy, codes, scale, zero_point, y;

  std::array<Storage*, 6> all() { return {&x, &dy, &codes, &scale, &zero_point, &y}; }
  std::string text() const {
    return fmt::format("op {} shape [{}] {} axis {} group {} q [{}, {}] {} {} scale {} zero {} {}{} align {}",
                       static_cast<int>(op), fmt::join(descriptor.shape, ", "),
                       to_string(descriptor.granularity), descriptor.axis, descriptor.group_size,
                       descriptor.q_min, descriptor.q_max, to_string(descriptor.dtype),
                       to_string(descriptor.code_dtype), to_string(descriptor.scale_dtype),
                       descriptor.zero_point_dtype ? to_string(*descriptor.zero_point_dtype) : "none",
                       descriptor.computed ? "computed " : "given ", to_string(descriptor.scale_rule),
                       descriptor.alignment) +
           (descriptor.strided ? " strided" : "");
  }
};

class LinearCases {
 public:
  explicit LinearCases(uint64_t seed) : random_(seed) {}

  // Shapes of at most about `most` elements.
  LinearCase next(int64_t most) {
    LinearCase result;
    result.op = static_cast<LinearOp>(random_() % 3);
    LinearDescriptor& d = result.descriptor;
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
    d.code_dtype = pick({DType::i8, DType::u8, DType::i4, DType::u4});
    d.scale_dtype = random_() % 2 ? d.dtype : DType::f32;
    if (random_() % 2) d.zero_point_dtype = random_() % 2 ? d.code_dtype : DType::i32;
    d.computed = result.op == LinearOp::quantize && random_() % 2;
    d.scale_rule = pick({ScaleRule::absmax, ScaleRule::half_range});
    const bool is_signed = d.code_dtype == DType::i8 || d.code_dtype == DType::i4;
    const int bits = is_packed(d.code_dtype) ? 4 : 8, low = is_signed ? -(1 << (bits - 1)) : 0;
    const int high = low + (1 << bits) - 1;
    d.q_min = low;
    d.q_max = high;
    switch (random_() % 4) {
      case 0:
        d.q_min = low + 1;  // [-127, 127]
        break;
      case 1:
        d.q_min = low + static_cast<int>(below(high - low));
        d.q_max = d.q_min + 1 + static_cast<int>(below(high - d.q_min));
        break;
      default:
        break;
    }
    if (!d.zero_point_dtype) {
      d.q_min = std::min(d.q_min, 0);
      d.q_max = std::max(d.q_max, 1);
    }
    d.strided = random_() % 4 == 0;
    d.alignment = random_() % 4 ? 16 : size_of(d.dtype);
    fill(result);
    return result;
  }

  // Memory for the tensors of a descriptor that is set.
  void fill(LinearCase& result) {
    const LinearDescriptor& d = result.descriptor;
    const bool quantizes = result.op == LinearOp::quantize, decodes = result.op == LinearOp::dequantize;
    if (!decodes) result.x = values(d, false);
    if (result.op == LinearOp::backward) result.dy = values(d, false);
    if (!quantizes) result.y = values(d, true);
    if (result.op != LinearOp::backward) result.codes = codes(d, quantizes);
    parameters(result);
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
      extent = pick<int64_t>({0, 1, 2, 3, 8, 16, 31, 32, 64, 72, 128, 200, 256, 1024, below(300) + 1});
      if (extent == 0 && random_() % 8) extent = 16;
      extent = std::min(extent, std::max<int64_t>(1, left));
      left /= std::max<int64_t>(1, extent);
    }
    std::shuffle(result.begin(), result.end(), random_);
    return result;
  }

  // Strides whose axes before and behind `axis` can be walked as one: the three lie in memory in any order.
  std::vector<int64_t> strides(const LinearDescriptor& d) {
    const size_t rank = d.shape.size(),
                 axis = static_cast<size_t>(d.axis < 0 ? d.axis + static_cast<int>(rank) : d.axis);
    const auto extent = [&](size_t begin, size_t end) {
      int64_t product = 1;
      for (size_t i = begin; i < end; ++i) product *= d.shape[i];
      return product;
    };
    const std::array<int64_t, 3> extents = {extent(0, axis), extent(axis, axis + 1), extent(axis + 1, rank)};
    std::array<size_t, 3> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), random_);
    std::array<int64_t, 3> folded{};
    int64_t stride = 1 + below(3);
    for (const size_t part : order) {
      folded[part] = stride;
      stride = stride * std::max<int64_t>(1, extents[part]) + below(4);
    }
    std::vector<int64_t> result(rank);
    for (size_t i = rank; i-- > 0;) {
      const size_t part = i < axis ? 0 : i == axis ? 1 : 2;
      result[i] = folded[part];
      folded[part] *= d.shape[i];
    }
    return result;
  }

  Storage storage(const LinearDescriptor& d, DType dtype, std::vector<int64_t> shape, bool walked) {
    Storage result;
    result.view.dtype = dtype;
    result.view.shape = std::move(shape);
    int64_t elements = 0, num_bytes = contiguous_bytes(dtype, result.view.shape);
    const bool strided = walked && d.strided && !is_packed(dtype) && !result.view.shape.empty();
    if (strided && num_bytes > 0 && random_() % 4) {
      result.view.strides = strides(d);
      for (size_t i = 0; i < result.view.shape.size(); ++i)
        elements += (result.view.shape[i] - 1) * result.view.strides[i];
      num_bytes = (elements + 1) * size_of(dtype);
    }
    const int64_t align = walked ? d.alignment : is_packed(dtype) ? 1 : size_of(dtype);
    result.offset = 256 + (walked && align >= 16 ? 0 : align * below(3));
    if (num_bytes > 0)
      result.bytes.assign(static_cast<size_t>(result.offset + num_bytes + 256), Storage::kPoison);
    return result;
  }
  // Calls set(index, offset) for each element: row-major index, offset in elements.
  template <class Set>
  void for_each(const Storage& storage, const Set& set) {
    const auto& shape = storage.view.shape;
    const int64_t n = num_elements(storage.view);
    std::vector<int64_t> at(shape.size(), 0);
    for (int64_t index = 0; index < n; ++index) {
      int64_t offset = 0;
      if (storage.view.strides.empty())
        offset = index;
      else
        for (size_t i = 0; i < shape.size(); ++i) offset += at[i] * storage.view.strides[i];
      set(index, offset);
      for (size_t i = shape.size(); i-- > 0;) {
        if (++at[i] < shape[i]) break;
        at[i] = 0;
      }
    }
  }

  Storage values(const LinearDescriptor& d, bool written) {
    Storage result = storage(d, d.dtype, d.shape, true);
    if (written || result.bytes.empty()) return result;
    Values random = random_values(d.dtype, num_elements(result.view), random_());
    const auto n = random.exact.size();
    if (random_() % 3 == 0)  // NaN and infinities
      for (size_t k = 0; k < 1 + n / 50; ++k) {
        Values bad;
        bad.dtype = d.dtype;
        bad.push_back(pick<double>({NAN, INFINITY, -INFINITY}));
        std::copy(bad.bytes.begin(), bad.bytes.end(),
                  random.bytes.begin() + below(static_cast<int64_t>(n)) * size_of(d.dtype));
      }
    const int64_t size = size_of(d.dtype);
    for_each(result, [&](int64_t index, int64_t offset) {
      std::copy_n(random.bytes.begin() + index * size, size,
                  result.bytes.begin() + result.offset + offset * size);
    });
    return result;
  }
  Storage codes(const LinearDescriptor& d, bool written) {
    Storage result = storage(d, d.code_dtype, d.shape, true);
    if (written) return result;
    for (uint8_t& byte : result.bytes) byte = static_cast<uint8_t>(random_());
    return result;
  }
  void parameters(LinearCase& result) {
    const LinearDescriptor& d = result.descriptor;
    result.scale = storage(d, d.scale_dtype, d.scale_shape(), false);
    if (d.zero_point_dtype) result.zero_point = storage(d, *d.zero_point_dtype, d.scale_shape(), false);
    if (d.computed) return;
    const int64_t n = num_elements(result.scale.view);
    Values scales;
    scales.dtype = d.scale_dtype;
    const bool any = random_() % 4 == 0;
    for (int64_t i = 0; i < n; ++i) {
      double scale =
          std::exp2(static_cast<double>(below(12)) - 12) * (1 + static_cast<double>(below(100)) / 100);
      if (any) {
        scale = pick<double>({scale, 0.0, -scale, std::nan(""), static_cast<double>(INFINITY), scale * 1e-37,
                              scale * 1e37, 1e-44});
      } else if (random_() % 8 == 0) {
        scale = std::exp2(static_cast<double>(below(8)) - 8);
      }
      scales.push_back(scale);
    }
    std::copy(scales.bytes.begin(), scales.bytes.end(), result.scale.bytes.begin() + result.scale.offset);
    if (!d.zero_point_dtype) return;
    auto* const bytes = result.zero_point.bytes.data() + result.zero_point.offset;
    if (*d.zero_point_dtype == DType::i32) {
      for (int64_t i = 0; i < n; ++i) {
        auto zero = static_cast<int32_t>(d.q_min + below(d.q_max - d.q_min + 1));
        if (any && random_() % 4 == 0) zero = static_cast<int32_t>(random_());
        std::memcpy(bytes + 4 * i, &zero, 4);
      }
    } else {
      for (int64_t i = 0; i < contiguous_bytes(*d.zero_point_dtype, result.zero_point.view.shape); ++i)
        bytes[i] = static_cast<uint8_t>(random_());
    }
  }

  std::mt19937_64 random_;
};

// Runs the case with tensors at `memory`, in the order of all(). The workspace is poisoned before.
template <class Op>
QuantizeStatus run_linear(const LinearCase& test, const typename Op::Args& args, Device device,
                          void* workspace, int64_t workspace_bytes, void* stream,
                          const PlanPreference& preference) {
  const auto plan = Plan<Op>::select(device, test.descriptor, preference);
  EXPECT_GT(plan.workspace_size(), 0);
  EXPECT_LE(plan.workspace_size(), workspace_bytes);
  if (const auto error = plan.can_implement(args)) ADD_FAILURE() << error->what();
  plan.run(stream, workspace, args);
  return plan.status(workspace, stream);
}
inline QuantizeStatus run_linear(const LinearCase& test, const std::array<void*, 6>& memory, Device device,
                                 void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                                 const PlanPreference& preference = {}) {
  const TensorView x = test.x.at(memory[0], device), dy = test.dy.at(memory[1], device),
                   codes = test.codes.at(memory[2], device), scale = test.scale.at(memory[3], device),
                   zero = test.zero_point.at(memory[4], device), y = test.y.at(memory[5], device);
  switch (test.op) {
    case LinearOp::quantize:
      return run_linear<QuantizeLinear>(test, {x, codes, scale, zero}, device, workspace, workspace_bytes,
                                        stream, preference);
    case LinearOp::dequantize:
      return run_linear<DequantizeLinear>(test, {codes, scale, zero, y}, device, workspace, workspace_bytes,
                                          stream, preference);
    default:
      break;
  }
  return run_linear<QuantizeLinearBackward>(test, {x, dy, scale, zero, y}, device, workspace, workspace_bytes,
                                            stream, preference);
}

}  // namespace halfbyte::testing
