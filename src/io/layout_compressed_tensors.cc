// The pack-quantized format of compressed-tensors: codes in words of 32 bits along the rows, zero points in
// such words along the columns.
#include <cstring>

#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kPacked = "_packed";

int64_t words(int64_t num_codes, int bits) { return (num_codes * bits + 31) / 32; }

std::vector<Part> parts(const QuantizedWeight& weight) {
  const int bits = info(weight.spec.format).bits;
  const std::vector<int64_t>& shape = weight.shape;
  const int64_t groups = weight.quant_shape().groups_per_row;
  const std::string& name = weight.name;
  std::vector<Part> parts = {
      {Role::codes, name + "_packed", "I32", with_last(shape, words(shape.back(), bits))},
      {Role::scales, name + "_scale", dtype_to_safetensors(weight.dtype), with_last(shape, groups)},
      {Role::constant,
       name + "_shape",
       "I64",
       {static_cast<int64_t>(shape.size())},
       std::string(reinterpret_cast<const char*>(shape.data()), shape.size() * sizeof(int64_t))}};
  if (has_zeros(weight.spec)) {
    std::vector<int64_t> zeros = with_last(shape, groups);
    zeros[zeros.size() - 2] = words(zeros[zeros.size() - 2], bits);
    parts.push_back({Role::zeros, name + "_zero_point", "I32", zeros});
  }
  return parts;
}

const StoredTensor& required(const Checkpoint::Impl& checkpoint, const std::string& name,
                             const std::string& of) {
  const StoredTensor* tensor = checkpoint.find(name);
  HALFBYTE_CHECK(tensor != nullptr, bad_input, "tensor \"{}\" has no \"{}\" beside it", printable(of),
                 printable(name));
  return *tensor;
}

// The tensors tell everything but the scale rule, which decoding does not need.
QuantizedWeight read_weight(const Checkpoint::Impl& checkpoint, const StoredTensor& packed) {
  QuantizedWeight weight;
  weight.layout = Layout::compressed_tensors;
  weight.name = packed.name.substr(0, packed.name.size() - kPacked.size());
  const StoredTensor& scale = required(checkpoint, weight.name + "_scale", packed.name);
  const StoredTensor& shape = required(checkpoint, weight.name + "_shape", packed.name);
  HALFBYTE_CHECK(checkpoint.find(weight.name + "_g_idx") == nullptr, bad_input,
                 "tensor \"{}_g_idx\": columns in activation order are not supported",
                 printable(weight.name));
  HALFBYTE_CHECK(shape.dtype == "I64" && (shape.num_bytes == 16 || shape.num_bytes == 24), bad_input,
                 "tensor \"{}\" must hold 2 or 3 extents of I64", printable(shape.name));
  weight.shape.resize(shape.num_bytes / sizeof(int64_t));
  checkpoint.read(shape, 0, std::as_writable_bytes(std::span(weight.shape)));
  const int64_t cols = weight.shape.back();
  HALFBYTE_CHECK(cols >= 0 && cols < INT64_MAX / 8, bad_input, "tensor \"{}\" says {} columns",
                 printable(shape.name), cols);

  const auto dtype = dtype_from_safetensors(scale.dtype);
  HALFBYTE_CHECK(dtype && is_floating(*dtype) && *dtype != DType::f64, bad_input,
                 "tensor \"{}\" must be F32, F16 or BF16, got {}", printable(scale.name), scale.dtype);
  weight.dtype = weight.spec.scale_dtype = *dtype;

  const int64_t num_words = packed.shape.empty() ? 0 : packed.shape.back();
  const bool is_int4 = num_words == words(cols, 4), is_int8 = num_words == words(cols, 8);
  HALFBYTE_CHECK(is_int4 != is_int8 || cols == 0, bad_input,
                 "tensor \"{}\": {} words for {} columns are neither 4 nor 8 bits each, or both",
                 printable(packed.name), num_words, cols);
  weight.spec.format = is_int4 ? Format::int4 : Format::int8;
  weight.spec.asymmetric = checkpoint.find(weight.name + "_zero_point") != nullptr;
  weight.spec.scale_rule = weight.spec.asymmetric ? ScaleRule::minmax : ScaleRule::half_range;

  const int64_t groups = scale.shape.empty() ? 0 : scale.shape.back();
  weight.spec.granularity = groups == 1 ? Granularity::channel : Granularity::group;
  if (groups > 1) {
    HALFBYTE_CHECK(cols % groups == 0 && cols > 0, bad_input,
                   "tensor \"{}\": {} columns do not divide into {} groups", printable(scale.name), cols,
                   groups);
    weight.spec.group_size = cols / groups;
  }
  return weight;
}

void match(const Checkpoint::Impl& checkpoint, std::vector<QuantizedWeight>& found) {
  for (const StoredTensor& tensor : checkpoint.tensors)  // other formats pack into U8
    if (tensor.name.ends_with(kPacked) && tensor.dtype == "I32")
      found.push_back(read_weight(checkpoint, tensor));
}

}  // namespace

const LayoutInfo& compressed_tensors_layout() {
  static const LayoutInfo layout = {.layout = Layout::compressed_tensors,
                                    .name = "compressed-tensors",
                                    .formats = {Format::int4, Format::int8},
                                    .asymmetric = true,
                                    .granularities = {Granularity::group, Granularity::channel},
                                    .default_group_size = 128,
                                    .whole_groups = true,
                                    .min_cols = 5,  // below, the words do not tell 4 from 8 bits
                                    .scale_rules = {ScaleRule::half_range, ScaleRule::absmax},
                                    .scale_dtypes = ScaleDTypes::of_weight,
                                    .row_align_bytes = 4,
                                    .packs_zeros = true,
                                    .zero_scale_is_eps = true,
                                    .parts = parts,
                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
