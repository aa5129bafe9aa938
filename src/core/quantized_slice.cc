// Parts of a quantized weight, along one of its axes.
#include <string>

#include "core/expect.h"
#include "core/plan_device.h"
#include "core/quantized_tensor.h"
#include "core/tensor_check.h"

namespace halfbyte {
namespace {

constexpr const char* kSlice = "slice";

// A weight [outer, extent, inner rows, cols], whose extent is cut: of columns, rows are outer.
struct Cut {
  bool columns;
  int64_t outer, extent, inner, cols;
};
Cut cut_of(std::span<const int64_t> shape, int axis) {
  const auto at = static_cast<size_t>(axis);
  const size_t last = shape.size() - 1;
  if (at == last) return {true, num_elements(shape.first(last)), shape[last], 1, shape[last]};
  return {false, num_elements(shape.first(at)), shape[at], num_elements(shape.subspan(at + 1, last - at - 1)),
          shape[last]};
}

bool is_grouped(const QuantSpec& spec) {
  return spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
}

// Whether groups, or bytes of codes, run across the rows.
bool crosses_rows(const QuantSpec& spec, int64_t cols) {
  return spec.granularity == Granularity::flat &&
         (cols % spec.group_size != 0 || cols % 8 * info(spec.format).bits % 8 != 0);
}

// Why `count` elements in their order cannot be cut before element `at`; empty: they can.
std::string refuse_cut(const QuantSpec& spec, int64_t at, int64_t count) {
  const int bits = info(spec.format).bits;
  if (at == count) return "";
  if (is_grouped(spec) && at % spec.group_size != 0)
    return fmt::format("element {} is not the first of a group of {}", at, spec.group_size);
  if (at % 8 * bits % 8 != 0)
    return fmt::format("element {}, of {} bits, is not the first of a byte", at, bits);
  return "";
}

std::string refuse_slice(const QuantSpec& spec, std::span<const int64_t> shape, const Slice& slice) {
  const Cut cut = cut_of(shape, slice.axis);
  const bool crosses = crosses_rows(spec, cut.cols);
  if (cut.columns || cut.outer > 1) {
    if (spec.double_quant)
      return fmt::format("blocks of {} scales with an absmax run across rows: take a slice of expanded()",
                         kDoubleQuantBlock);
    if (crosses) return fmt::format("groups of {} run across rows of {}", spec.group_size, cut.cols);
  }
  const int64_t of_index = cut.columns ? 1 : cut.inner * cut.cols;
  if (cut.columns || crosses)
    for (const int64_t at : {slice.begin, slice.end})
      if (std::string reason = refuse_cut(spec, at * of_index, cut.extent * of_index); !reason.empty())
        return reason;
  if (!spec.double_quant) return "";
  const int64_t scale = quant_shape(spec, slice.begin * cut.inner, cut.cols).num_groups;
  if (scale % kDoubleQuantBlock == 0) return "";
  return fmt::format("scale {} is not the first of a block of {} with an absmax: take a slice of expanded()",
                     scale, kDoubleQuantBlock);
}

}  // namespace

std::vector<int64_t> check_slice(const char* op, std::span<const int64_t> shape, const Slice& slice) {
  HALFBYTE_MUST(slice.axis >= 0 && slice.axis < std::ssize(shape), invalid_argument, op, "slice.axis", "be",
                fmt::format("an axis of {}", text_of(shape)), slice.axis);
  const auto axis = static_cast<size_t>(slice.axis);
  HALFBYTE_MUST(slice.begin >= 0 && slice.begin <= slice.end && slice.end <= shape[axis], invalid_argument,
                op, "slice", "lie", fmt::format("within the {} elements of axis {}", shape[axis], axis),
                fmt::format("{} to {}", slice.begin, slice.end));
  std::vector<int64_t> result(shape.begin(), shape.end());
  result[axis] = slice.end - slice.begin;
  return result;
}

std::vector<int64_t> check_slice(const char* op, const QuantSpec& spec, std::span<const int64_t> shape,
                                 const Slice& slice) {
  std::vector<int64_t> result = check_slice(op, shape, slice);
  const std::string reason = refuse_slice(spec, shape, slice);
  HALFBYTE_CHECK(reason.empty(), usage, "{}: a weight {} has no slice {} to {} of axis {}: {}", op,
                 text_of(shape), slice.begin, slice.end, slice.axis, reason);
  return result;
}

QuantizedTensor QuantizedTensor::slice(const Slice& slice, void* stream) const {
  check_quantized(kSlice, *this);
  std::vector<int64_t> kept = check_slice(kSlice, spec, shape, slice);
  const Cut cut = cut_of(shape, slice.axis);
  // Many short runs: not one by one to a device.
  if (cut.columns && device().kind != DeviceKind::cpu)
    return to(Device{}, stream).slice(slice).to(device(), stream);

  int64_t first_code = 0, first_group = 0;
  if (cut.columns) {
    first_code = slice.begin / 8 * info(spec.format).bits + slice.begin % 8 * info(spec.format).bits / 8;
    if (is_grouped(spec)) first_group = slice.begin / spec.group_size;
  } else {
    const QuantShape before = quant_shape(spec, slice.begin * cut.inner, cut.cols);
    first_code = before.code_bytes();
    first_group = before.num_groups;
  }
  QuantizedTensor result(spec, std::move(kept), dtype, device());
  result.encoding = encoding;
  // From byte `first` of each of the `count` pieces of the part.
  const auto move = [&](Tensor QuantizedTensor::*part, int64_t count, int64_t first) {
    const Tensor &from = this->*part, &into = result.*part;
    if (into.num_bytes() == 0) return;
    const int64_t size = into.num_bytes() / count, stride = from.num_bytes() / count;
    for (int64_t i = 0; i < count; ++i)
      copy(device(), into.data() + i * size, from.data() + i * stride + first, size, stream);
  };
  move(&QuantizedTensor::codes, cut.outer, first_code);
  for (const auto part : {&QuantizedTensor::scales, &QuantizedTensor::zeros, &QuantizedTensor::biases}) {
    if (spec.granularity == Granularity::tensor)
      move(part, 1, 0);
    else if ((result.*part).num_bytes() > 0)
      move(part, cut.outer, first_group * size_of((result.*part).dtype()));
  }
  move(&QuantizedTensor::scales_absmax, 1, first_group / kDoubleQuantBlock * int64_t{sizeof(float)});
  for (const auto part :
       {&QuantizedTensor::scales_map, &QuantizedTensor::scales_offset, &QuantizedTensor::global_scale})
    move(part, 1, 0);
  wait_for(device(), stream);
  return result;
}

}  // namespace halfbyte
