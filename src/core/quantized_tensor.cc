#include "core/quantized_tensor.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/tensor_check.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {
namespace {

constexpr const char* kQuantizedTensor = "quantized tensor";

// What a part must be. `shape`: as the library makes it.
struct QuantizedPart {
  const char* name;
  Tensor QuantizedTensor::*tensor;
  DType dtype;
  std::vector<int64_t> shape;
  bool present = true;
};

int64_t num_scale_blocks(int64_t num_scales) { return ceil_div(num_scales, kDoubleQuantBlock); }

std::vector<QuantizedPart> parts_of(const QuantizedTensor& q) {
  const QuantSpec& spec = q.spec;
  const QuantShape s = quant_shape(spec, q.rows(), q.cols());
  const bool by_rows = spec.granularity == Granularity::group || spec.granularity == Granularity::channel;
  const std::vector<int64_t> groups =
      by_rows ? std::vector<int64_t>{s.rows, s.groups_per_row} : std::vector<int64_t>{s.num_groups};
  const std::vector<int64_t> codes = spec.granularity == Granularity::flat
                                         ? std::vector<int64_t>{s.row_bytes}
                                         : std::vector<int64_t>{s.rows, s.row_bytes};
  using Q = QuantizedTensor;
  const bool nested = spec.double_quant;
  return {{"codes", &Q::codes, DType::u8, codes},
          {"scales", &Q::scales, nested ? DType::u8 : spec.scale_dtype, groups},
          {"zeros", &Q::zeros, DType::u8, groups, has_zeros(spec)},
          {"biases", &Q::biases, spec.scale_dtype, groups, has_biases(spec)},
          {"scales_absmax", &Q::scales_absmax, DType::f32, {num_scale_blocks(s.num_groups)}, nested},
          {"scales_map", &Q::scales_map, DType::f32, {256}, nested},
          {"scales_offset", &Q::scales_offset, DType::f32, {1}, nested},
          {"global_scale", &Q::global_scale, DType::f32, {1}, has_global_scale(spec)}};
}

constexpr Tensor QuantizedTensor::*kParts[] = {
    &QuantizedTensor::codes,         &QuantizedTensor::scales,        &QuantizedTensor::zeros,
    &QuantizedTensor::biases,        &QuantizedTensor::scales_absmax, &QuantizedTensor::scales_map,
    &QuantizedTensor::scales_offset, &QuantizedTensor::global_scale};

// Of the extents but the last `count`.
int64_t product_before(std::span<const int64_t> shape, size_t count) {
  return contiguous_bytes(DType::u8, shape.first(shape.size() - std::min(count, shape.size())));
}

template <class T>
T* data_of(const Tensor& part) {
  return part.num_bytes() == 0 ? nullptr : reinterpret_cast<T*>(part.data());
}

}  // namespace

void check_quantized(const char* op, const QuantizedTensor& q) {
  HALFBYTE_CHECK(is_floating(q.dtype), usage, "{}: dtype must be f32, f16, bf16 or f64, got {}", op,
                 to_string(q.dtype));
  for (const QuantizedPart& part : parts_of(q)) {
    const Tensor& tensor = q.*part.tensor;
    if (!part.present) {
      HALFBYTE_CHECK(tensor.num_elements() == 0, usage, "{}: {} must be empty: the spec does not have them",
                     op, part.name);
      continue;
    }
    const int64_t wanted = product_before(part.shape, 0);
    HALFBYTE_CHECK(tensor.num_elements() == wanted && (wanted == 0 || tensor.dtype() == part.dtype), usage,
                   "{}: {} must be {} elements of {} for a weight {}, got {} of {}", op, part.name, wanted,
                   to_string(part.dtype), text_of(q.shape), tensor.num_elements(), to_string(tensor.dtype()));
    HALFBYTE_CHECK(wanted == 0 || tensor.device() == q.device(), usage,
                   "{}: {} must be on {}, as the codes, got {}", op, part.name, to_string(q.device()),
                   to_string(tensor.device()));
  }
}

QuantizedTensor::QuantizedTensor(const QuantSpec& spec_, std::vector<int64_t> shape_, DType dtype_,
                                 Device device)
    : spec(spec_), shape(std::move(shape_)), dtype(dtype_) {
  product_before(shape, 0);  // throws for what is no shape
  for (const QuantizedPart& part : parts_of(*this))
    if (part.present) this->*part.tensor = Tensor(device, part.dtype, part.shape);
  if (!spec.double_quant) return;
  Tensor map({}, DType::f32, {256});
  std::memcpy(map.data(), double_quant_map(), 256 * sizeof(float));
  scales_map = map.to(device);
}

int64_t QuantizedTensor::rows() const { return product_before(shape, 1); }
int64_t QuantizedTensor::cols() const { return shape.empty() ? 1 : shape.back(); }
int64_t QuantizedTensor::num_experts() const { return product_before(shape, 2); }
int64_t QuantizedTensor::num_bytes() const {
  int64_t sum = 0;
  for (const auto part : kParts) sum += (this->*part).num_bytes();
  return sum;
}

QuantizedView QuantizedTensor::view() const {
  check_quantized(kQuantizedTensor, *this);
  HALFBYTE_CHECK(!spec.double_quant, usage,
                 "{}: a view has no double quantization: take expanded().view(), or weight_view()",
                 kQuantizedTensor);
  return {spec,
          rows(),
          cols(),
          data_of<uint8_t>(codes),
          data_of<void>(scales),
          data_of<uint8_t>(zeros),
          data_of<void>(biases),
          data_of<float>(global_scale)};
}

WeightView QuantizedTensor::weight_view(int64_t expert) const {
  check_quantized(kQuantizedTensor, *this);
  const int64_t experts = num_experts();
  HALFBYTE_CHECK(expert >= 0 && expert < experts, usage, "{}: expert must be 0 to {}, got {}",
                 kQuantizedTensor, experts - 1, expert);
  const int64_t n = rows() / experts, k = cols();
  const WeightViewBytes bytes = weight_view_bytes(spec, n, k, Layout::halfbyte);
  const bool flat = spec.granularity == Granularity::flat;
  int64_t first_code = expert * bytes.codes, first_group = 0;
  if (spec.granularity != Granularity::tensor) first_group = expert * quant_shape(spec, n, k).num_groups;
  if (flat && expert > 0) {
    const int64_t begin = expert * n * k;
    HALFBYTE_CHECK(
        begin % spec.group_size == 0 && begin * info(spec.format).bits % 8 == 0, usage,
        "{}: expert {} has no view of its own: its {} elements are not whole groups of {} in whole bytes",
        kQuantizedTensor, expert, n * k, spec.group_size);
    first_code = begin * info(spec.format).bits / 8;
    first_group = begin / spec.group_size;
  }
  HALFBYTE_CHECK(
      !spec.double_quant || first_group % kDoubleQuantBlock == 0, usage,
      "{}: expert {} has no view of its own: its first scale is number {}, not one of a block of {}",
      kQuantizedTensor, expert, first_group, kDoubleQuantBlock);
  const auto at = [](const Tensor& part, int64_t byte) -> std::byte* {
    return part.num_bytes() == 0 ? nullptr : part.data() + byte;
  };
  const auto floats = [](std::byte* data) { return reinterpret_cast<float*>(data); };
  const int64_t scale_bytes = size_of(spec.scale_dtype);
  WeightView view{spec, n, k, Layout::halfbyte};
  view.codes = at(codes, first_code);
  view.scales = at(scales, first_group * (spec.double_quant ? 1 : scale_bytes));
  view.zeros = at(zeros, first_group);
  view.biases = at(biases, first_group * scale_bytes);
  view.absmax = floats(at(scales_absmax, first_group / kDoubleQuantBlock * int64_t{sizeof(float)}));
  view.map = floats(at(scales_map, 0));
  view.offset = floats(at(scales_offset, 0));
  view.global_scale = floats(at(global_scale, 0));
  view.device = device();
  return view;
}

QuantizedTensor QuantizedTensor::expanded(void* stream) const {
  check_quantized(kQuantizedTensor, *this);
  if (!spec.double_quant) return *this;
  const QuantizedTensor host = to(Device{}, stream);
  QuantizedTensor result = *this;
  result.spec.double_quant = false;
  result.scales_absmax = result.scales_map = result.scales_offset = Tensor();
  const Tensor values({}, DType::f32, scales.shape());
  const auto floats = [](const Tensor& part) { return reinterpret_cast<float*>(part.data()); };
  double_dequantize({reinterpret_cast<uint8_t*>(host.scales.data()), floats(host.scales_absmax),
                     *floats(host.scales_offset)},
                    scales.num_elements(), floats(values), floats(host.scales_map));
  result.scales = values.to(device(), stream);
  return result;
}

QuantizedTensor QuantizedTensor::to(Device device, void* stream) const {
  QuantizedTensor result = *this;
  for (const auto part : kParts)
    if ((this->*part).num_bytes() > 0 || part == &QuantizedTensor::codes)
      result.*part = (this->*part).to(device, stream);
  return result;
}

}  // namespace halfbyte
