// For the tests of linear quantization: random descriptors, tensors of any strides in poisoned memory, plans
// on the CPU beside plans on a device.
#pragma once

#include "grouped/linear_args.h"
#include "grouped/testing.h"
#include "halfbyte/quantize_linear.hpp"

namespace halfbyte::testing {

// One run of an operation: what it reads is filled, what it writes is poisoned.
struct LinearCase {
  LinearOp op = LinearOp::quantize;
  LinearDescriptor descriptor;
  Storage x, dy, codes, scale, zero_point, y;

  static constexpr std::array kNames = {"x", "dy", "codes", "scale", "zero_point", "y"};
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

class LinearCases : RandomCases {
 public:
  explicit LinearCases(uint64_t seed) : RandomCases(seed) {}

  // Shapes of at most about `most` elements.
  LinearCase next(int64_t most) {
    LinearCase result;
    result.op = static_cast<LinearOp>(random_() % 3);
    LinearDescriptor& d = result.descriptor;
    set_groups(d, most);
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
    const int64_t element = is_packed(dtype) ? 1 : size_of(dtype);
    const bool promised = walked && (element > 1 || d.alignment >= 16);
    const int64_t align = promised ? d.alignment : element;
    result.allocate(num_bytes, walked && align >= 16 ? 0 : align * below(3));
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
    const bool any = random_() % 4 == 0;
    for (int64_t i = 0; i < n; ++i) put(result.scale, i, scale(any));
    if (!d.zero_point_dtype) return;
    if (*d.zero_point_dtype == DType::i32)
      for (int64_t i = 0; i < n; ++i) put_zero_point(result.zero_point, i, d.q_min, d.q_max, any);
    else
      for (int64_t i = 0; i < result.zero_point.num_bytes(); ++i)
        result.zero_point.data()[i] = static_cast<uint8_t>(random_());
  }
};

inline QuantizeStatus run_case(const LinearCase& test, const std::array<void*, 6>& memory, Device device,
                               void* workspace, int64_t workspace_bytes, void* stream = nullptr,
                               const PlanPreference& preference = {}) {
  const TensorView x = test.x.at(memory[0], device), dy = test.dy.at(memory[1], device),
                   codes = test.codes.at(memory[2], device), scale = test.scale.at(memory[3], device),
                   zero = test.zero_point.at(memory[4], device), y = test.y.at(memory[5], device);
  switch (test.op) {
    case LinearOp::quantize:
      return run_plan<QuantizeLinear>(test.descriptor, {x, codes, scale, zero}, device, workspace,
                                      workspace_bytes, stream, preference);
    case LinearOp::dequantize:
      return run_plan<DequantizeLinear>(test.descriptor, {codes, scale, zero, y}, device, workspace,
                                        workspace_bytes, stream, preference);
    default:
      break;
  }
  return run_plan<QuantizeLinearBackward>(test.descriptor, {x, dy, scale, zero, y}, device, workspace,
                                          workspace_bytes, stream, preference);
}

}  // namespace halfbyte::testing
