#include "core/weight_view.h"

#include <algorithm>
#include <array>

#include "core/checks.h"
#include "core/packed_weight.h"
#include "halfbyte/device.hpp"
#include "halfbyte/ops.hpp"

namespace halfbyte {

formats::WeightViewLayout view_layout_of(const QuantSpec& spec, int64_t rows, int64_t cols, Layout layout) {
  check_spec(spec);
  const FormatInfo& format = info(spec.format);
  HALFBYTE_CHECK(spec.scale_dtype != DType::f64, usage,
                 "weight view: spec.scale_dtype must have 32 bits at most, got {}",
                 to_string(spec.scale_dtype));
  HALFBYTE_CHECK(rows >= 0 && cols >= 0 && rows <= kMaxWeightExtent && cols <= kMaxWeightExtent, usage,
                 "weight view: extents must be 0 to 2^40, got [{}, {}]", rows, cols);
  quant_shape(spec, rows, formats::round_up(cols, 8));  // throws for too many bits; of whole words
  HALFBYTE_CHECK(layout != Layout::gptq && layout != Layout::awq, usage,
                 "weight view: layout {} is transposed, which products do not read: give the native parts",
                 to_string(layout));
  HALFBYTE_CHECK(layout != Layout::modelopt && layout != Layout::fp8 && layout != Layout::gpt_oss, usage,
                 "weight view: layout {} is one of files: give the native parts", to_string(layout));
  HALFBYTE_CHECK(layout != Layout::bitsandbytes || format.bits == 4, usage,
                 "weight view: layout bitsandbytes has codes of 4 bits, got {}", format.name);
  const bool grouped = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  formats::WeightViewLayout v;
  v.rows = rows;
  v.cols = cols;
  v.bits = format.bits;
  v.group = grouped ? spec.group_size : std::max<int64_t>(cols, 1);
  v.groups = cols == 0 ? 0 : (cols - 1) / v.group + 1;
  v.one_group = spec.granularity == Granularity::tensor;
  const bool flat = spec.granularity == Granularity::flat;
  v.flat = flat && cols % v.group != 0;  // else they are those of rows
  v.flat_codes = layout == Layout::bitsandbytes || (layout == Layout::halfbyte && flat);
  const bool words = layout == Layout::compressed_tensors || layout == Layout::mlx;
  v.row_bytes = words ? formats::round_up(cols * v.bits, 32) / 8 : (cols * v.bits + 7) / 8;
  v.high_first = layout == Layout::bitsandbytes;
  v.zero_words = has_zeros(spec) && layout == Layout::compressed_tensors;
  HALFBYTE_CHECK(
      !v.zero_words || (!v.flat && !v.one_group), usage,
      "weight view: zero points of layout compressed-tensors are of groups within rows, got granularity "
      "{} for {} columns",
      to_string(spec.granularity), cols);
  return v;
}

WeightViewBytes weight_view_bytes(const QuantSpec& spec, int64_t rows, int64_t cols, Layout layout) {
  const formats::WeightViewLayout v = view_layout_of(spec, rows, cols, layout);
  const int64_t num_scales = v.num_scales(), scale_bytes = num_scales * size_of(spec.scale_dtype);
  WeightViewBytes bytes;
  bytes.codes = v.code_bytes();
  bytes.scales = spec.double_quant ? num_scales : scale_bytes;
  if (has_zeros(spec)) bytes.zeros = v.zero_bytes();
  if (has_biases(spec)) bytes.biases = scale_bytes;
  if (has_global_scale(spec)) bytes.global_scale = 4;
  if (!spec.double_quant) return bytes;
  bytes.absmax = (num_scales + kDoubleQuantBlock - 1) / kDoubleQuantBlock * 4;
  bytes.map = 256 * 4;
  bytes.offset = 4;
  return bytes;
}

void check_packed_form(const char* op, const char* name, const ConstPackedWeight& weight, Device device) {
  HALFBYTE_CHECK(weight.version == kPackedWeightVersion, usage, "{}: {}.version must be {}, got {}", op, name,
                 kPackedWeightVersion, weight.version);
  HALFBYTE_CHECK(weight.device == device, usage, "{}: {} must be on {}, got {}", op, name, to_string(device),
                 to_string(weight.device));
}

ArgumentMemory check_packed(const char* op, const char* name, const ConstPackedWeight& weight, Device device,
                            bool written) {
  check_packed_form(op, name, weight, device);
  const ArgumentMemory memory{name,
                              weight.data,
                              packed_layout_of(weight.spec, weight.rows, weight.cols).num_bytes,
                              weight.num_bytes,
                              packed_alignment(device),
                              false,
                              written};
  check_argument(op, memory, device);
  return memory;
}

std::array<WeightViewPart, 8> weight_view_parts(const WeightViewNames& names, const QuantSpec& spec,
                                                int64_t rows, int64_t cols, Layout layout,
                                                int64_t code_alignment) {
  using View = const ConstWeightView&;
  const WeightViewBytes bytes = weight_view_bytes(spec, rows, cols, layout);
  const bool nested = spec.double_quant;
  const int64_t scale_size = size_of(spec.scale_dtype);
  return {{
      {names.codes, [](View v) -> const void* { return v.codes; }, true, bytes.codes, code_alignment},
      {names.scales, [](View v) -> const void* { return v.scales; }, true, bytes.scales,
       nested ? 1 : scale_size},
      {names.zeros, [](View v) -> const void* { return v.zeros; }, has_zeros(spec), bytes.zeros,
       layout == Layout::compressed_tensors ? 4 : 1},
      {names.biases, [](View v) -> const void* { return v.biases; }, has_biases(spec), bytes.biases,
       scale_size},
      {names.absmax, [](View v) -> const void* { return v.absmax; }, nested, bytes.absmax, 4},
      {names.map, [](View v) -> const void* { return v.map; }, nested, bytes.map, 4},
      {names.offset, [](View v) -> const void* { return v.offset; }, nested, bytes.offset, 4},
      {names.global_scale, [](View v) -> const void* { return v.global_scale; }, has_global_scale(spec),
       bytes.global_scale, 4},
  }};
}

void check_view_device(const char* op, const char* name, const ConstWeightView& view, Device device) {
  HALFBYTE_CHECK(view.device == device, usage, "{}: {} must be on {}, got {}", op, name, to_string(device),
                 to_string(view.device));
}

std::vector<ArgumentMemory> check_view(const char* op, const WeightViewNames& names,
                                       const ConstWeightView& view, Device device, int64_t code_alignment,
                                       bool written) {
  check_view_device(op, names.view, view, device);
  std::vector<ArgumentMemory> memory;
  for (const WeightViewPart& part :
       weight_view_parts(names, view.spec, view.rows, view.cols, view.layout, code_alignment)) {
    const void* const data = part.data(view);
    HALFBYTE_CHECK(part.present || data == nullptr, usage, "{}: {} must be null: {}", op, part.name,
                   kNoWeightPart);
    if (!part.present) continue;
    memory.push_back({part.name, data, part.num_bytes, -1, part.alignment, false, written});
    check_argument(op, memory.back(), device);
  }
  return memory;
}

}  // namespace halfbyte
