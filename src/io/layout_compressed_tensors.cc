// compressed-tensors. Its format pack-quantized: codes in words of 32 bits along the rows, zero points in
// such words along the columns. nvfp4-pack-quantized and mxfp4-pack-quantized: codes in bytes, scales of 8
// bits. float-quantized: codes of E4M3; mxfp8-quantized, which is only read, has scales of U8 for 32 of them.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kPacked = "_packed", kScale = "_scale";

int64_t words(int64_t num_codes, int bits) { return (num_codes * bits + 31) / 32; }

std::vector<Part> block_float_parts(const QuantizedWeight& weight) {
  const std::string& name = weight.name;
  const bool global = has_global_scale(weight.spec);
  std::vector<Part> parts = {
      {Role::codes, name + "_packed", "U8", with_last(weight.shape, weight.shape.back() / 2)},
      {Role::scales, name + "_scale", global ? "F8_E4M3" : "U8",
       with_last(weight.shape, weight.quant_shape().groups_per_row)}};
  if (global)
    parts.push_back({Role::constant,
                     name + "_global_scale",
                     "F32",
                     {1},
                     std::string(reinterpret_cast<const char*>(&weight.global_scale), sizeof(float))});
  return parts;
}

std::vector<Part> parts(const QuantizedWeight& weight) {
  if (info(weight.spec.format).scale_dtype) return block_float_parts(weight);
  if (weight.spec.format == Format::fp8)
    return {fp8_codes(weight), fp8_scales(weight, weight.name + std::string(kScale))};
  const int bits = info(weight.spec.format).bits;
  const std::vector<int64_t>& shape = weight.shape;
  const int64_t groups = weight.quant_shape().groups_per_row;
  const bool one_scale = weight.spec.granularity == Granularity::tensor;
  const std::string& name = weight.name;
  std::vector<Part> parts = {
      {Role::codes, name + "_packed", "I32", with_last(shape, words(shape.back(), bits))},
      {Role::scales, name + "_scale", dtype_to_safetensors(weight.dtype),
       one_scale ? std::vector<int64_t>{1} : with_last(shape, groups)},
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

// The number of bits: one that the config has, or the tensors tell where it does not say. Rows of 32 columns
// or more have as many words as bits for each 32 of them.
int read_bits(const StoredTensor& packed, int64_t cols, const std::vector<int>& of_config) {
  constexpr int kRead[] = {2, 3, 4, 5, 6, 8};
  const std::string name = printable(packed.name);
  const int64_t num_words = packed.shape.empty() ? 0 : packed.shape.back();
  // Packed without gaps; and in whole codes to a word, as compressed-tensors did it first.
  const auto fits = [&](int bits) { return num_words == words(cols, bits); };
  const auto fits_gaps = [&](int bits) { return num_words == (cols + 32 / bits - 1) / (32 / bits); };
  const auto is_read = [&](int bits) { return std::ranges::find(kRead, bits) != std::end(kRead); };
  for (const int bits : of_config) {
    HALFBYTE_CHECK(is_read(bits) || !(fits(bits) || fits_gaps(bits)), bad_input,
                   "tensor \"{}\": config.json has weights of {} bits, which halfbyte does not read", name,
                   bits);
    const bool has_gaps = 32 % bits != 0 && fits_gaps(bits) && num_words > 1;
    HALFBYTE_CHECK(!has_gaps || !fits(bits), bad_input,
                   "tensor \"{}\": {} words for {} columns of {} bits may be packed in two ways", name,
                   num_words, cols, bits);
    HALFBYTE_CHECK(
        !has_gaps || std::ranges::any_of(of_config, fits), bad_input,
        "tensor \"{}\": has {} codes of {} bits in a word, as old versions of compressed-tensors packed "
        "them: save the model again with a newer one",
        name, 32 / bits, bits);
  }
  std::vector<int> found;
  const auto find_in = [&](std::span<const int> list) {
    std::ranges::copy_if(list, std::back_inserter(found), fits);
  };
  if (!of_config.empty()) {
    find_in(of_config);
  } else {
    // In short rows, what halfbyte writes is preferred to what only others do.
    find_in(std::array{4, 8});
    if (found.empty()) find_in(kRead);
    HALFBYTE_CHECK(!found.empty() || !fits(7), bad_input,
                   "tensor \"{}\": has codes of 7 bits, which halfbyte does not read", name);
  }
  if (cols == 0) return found.empty() ? 4 : found.front();
  HALFBYTE_CHECK(found.size() == 1, bad_input,
                 "tensor \"{}\": {} words for {} columns are not codes of {} bits{}", name, num_words, cols,
                 fmt::join(of_config.empty() ? std::span<const int>(kRead) : of_config, " or "),
                 found.empty() ? "" : fmt::format(", but may be of {}", fmt::join(found, " or ")));
  return found.front();
}

Format integer_format(int bits) {
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::integer && format.bits == bits) return format.format;
  HALFBYTE_FAIL(bug, "no integers of {} bits", bits);
}

// The tensors tell everything else but the scale rule, which decoding does not need.
QuantizedWeight read_weight(const Checkpoint::Impl& checkpoint, const StoredTensor& packed,
                            const std::vector<int>& bits_of_config) {
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
  HALFBYTE_CHECK(cols >= 0 && cols < INT64_MAX / 16, bad_input, "tensor \"{}\" says {} columns",
                 printable(shape.name), cols);

  const auto dtype = dtype_from_safetensors(scale.dtype);
  HALFBYTE_CHECK(dtype && is_floating(*dtype) && *dtype != DType::f64, bad_input,
                 "tensor \"{}\" must be F32, F16 or BF16, got {}", printable(scale.name), scale.dtype);
  weight.dtype = weight.spec.scale_dtype = *dtype;

  weight.spec.format = integer_format(read_bits(packed, cols, bits_of_config));
  weight.spec.asymmetric = checkpoint.find(weight.name + "_zero_point") != nullptr;

  const int64_t groups = scale.shape.empty() ? 0 : scale.shape.back();
  weight.spec.granularity = groups == 1 ? Granularity::channel : Granularity::group;
  if (groups == 1 && scale.shape.size() == 1) {
    weight.spec.granularity = Granularity::tensor;
    HALFBYTE_CHECK(!weight.spec.asymmetric, bad_input,
                   "tensor \"{}_zero_point\": a zero point of the whole tensor is not supported",
                   printable(weight.name));
  }
  if (groups > 1) {
    HALFBYTE_CHECK(cols % groups == 0 && cols > 0, bad_input,
                   "tensor \"{}\": {} columns do not divide into {} groups", printable(scale.name), cols,
                   groups);
    weight.spec.group_size = cols / groups;
  }
  return weight;
}

// The dtype of its scales tells the format.
QuantizedWeight read_block_float(const Checkpoint::Impl& checkpoint, const StoredTensor& packed) {
  const std::string name = packed.name.substr(0, packed.name.size() - kPacked.size());
  const StoredTensor& scale = required(checkpoint, name + "_scale", packed.name);
  HALFBYTE_CHECK(scale.dtype == "F8_E4M3" || scale.dtype == "U8", bad_input,
                 "tensor \"{}\" must be F8_E4M3 or U8, got {}", printable(scale.name), scale.dtype);
  QuantizedWeight weight = block_float_weight(checkpoint, scale.dtype == "U8" ? Format::mxfp4 : Format::nvfp4,
                                              Layout::compressed_tensors, name, packed);
  if (has_global_scale(weight.spec))
    weight.global_scale =
        read_f32(checkpoint, name + "_global_scale", fmt::format("weight \"{}\"", printable(name)));
  add_activation_scale(checkpoint, module_of(name) + ".input_global_scale", weight);
  return weight;
}

std::vector<int> bits_of_config(const Checkpoint::Impl& checkpoint) {
  if (checkpoint.config.empty()) return {};
  try {
    return compressed_tensors_bits(checkpoint.config);
  } catch (const Error&) {
    return {};  // the tensors tell; whoever writes a checkpoint parses it again, and says so
  }
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  std::optional<std::vector<int>> bits;  // of the config; read where it is needed
  for (const StoredTensor& tensor : checkpoint.tensors) {
    if (tensor.dtype == "F8_E4M3" || tensor.dtype == "F8_E5M2")
      if (const StoredTensor* scale = checkpoint.find(tensor.name + std::string(kScale)))
        if (auto weight = fp8_weight(checkpoint, Layout::compressed_tensors, tensor.name, tensor, *scale)) {
          add_activation_scale(checkpoint, module_of(tensor.name) + ".input_scale", *weight);
          found.weights.push_back(*std::move(weight));
        }
    if (!tensor.name.ends_with(kPacked)) continue;
    if (tensor.dtype == "U8") found.weights.push_back(read_block_float(checkpoint, tensor));
    if (tensor.dtype != "I32") continue;
    if (!bits) bits = bits_of_config(checkpoint);
    found.weights.push_back(read_weight(checkpoint, tensor, *bits));
  }
}

}  // namespace

const LayoutInfo& compressed_tensors_layout() {
  static const LayoutInfo& layout =
      *new LayoutInfo{.layout = Layout::compressed_tensors,
                      .name = "compressed-tensors",
                      .formats = {Format::int4, Format::int8, Format::nvfp4, Format::mxfp4, Format::fp8},
                      .asymmetric = true,
                      .granularities = {Granularity::group, Granularity::channel},
                      .default_group_size = 128,
                      .fp8_granularities = {Granularity::channel, Granularity::group, Granularity::tensor},
                      .whole_groups = true,
                      .min_cols = 5,  // below, the words do not tell 4 from 8 bits
                      .scale_rules = {ScaleRule::half_range, ScaleRule::absmax},
                      .scale_dtypes = ScaleDTypes::of_weight,
                      .many_specs = false,
                      .sources = {Format::int2, Format::int3, Format::int4, Format::int5, Format::int6,
                                  Format::int8, Format::nvfp4, Format::mxfp4, Format::fp8},
                      .apart = true,
                      .row_align_bytes = 4,
                      .packs_zeros = true,
                      .zero_scale_is_eps = true,
                      .parts = parts,
                      .match = match};
  return layout;
}

}  // namespace halfbyte::io
