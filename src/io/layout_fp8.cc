// FP8 as DeepSeek published it, and Qwen and others since: codes of E4M3, and a scale for blocks of 128 x
// 128. Other blocks, a scale for the tensor, scales that are exponents, and what DeepSeek-V4 has are read:
// P.scale, and experts of mxfp4. What this, float-quantized of compressed-tensors and the FP8 of ModelOpt
// have in common.
#include <algorithm>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

// How the tensors of a weight end, after the same name.
struct Ending {
  std::string_view scales, codes;
};
constexpr Ending kOfWeight = {"_scale_inv", ""};  // despite its name what codes are multiplied by
constexpr Ending kOfModule = {".scale", ".weight"};

std::vector<Part> parts(const QuantizedWeight& weight) {
  const std::string scales = weight.scales_of_module ? module_of(weight.name) + std::string(kOfModule.scales)
                                                     : weight.name + std::string(kOfWeight.scales);
  if (weight.spec.format == Format::fp8) return {fp8_codes(weight), fp8_scales(weight, scales)};
  return {{Role::codes, weight.name, "I8", with_last(weight.shape, weight.cols() / 2)},
          {Role::scales, scales, "F8_E8M0", with_last(weight.shape, weight.quant_shape().groups_per_row)}};
}

// A format of floats that the layout does not hold.
bool is_only_read(const LayoutInfo& layout, Format format) {
  const bool floats = format == Format::fp8 || info(format).scale_dtype;
  return floats && !layout.formats.empty() &&
         std::ranges::find(layout.formats, format) == layout.formats.end();
}

std::vector<int64_t> scale_shape(const QuantizedWeight& weight) {
  if (weight.spec.granularity == Granularity::tensor)
    return weight.layout == Layout::compressed_tensors ? std::vector<int64_t>{1} : std::vector<int64_t>{};
  std::vector<int64_t> shape = with_last(weight.shape, weight.quant_shape().groups_per_row);
  int64_t& rows = shape[shape.size() - 2];
  rows = ceil_div(rows, weight.scale_rows);
  return shape;
}

// Rows have no scales of their own in the layout, but for blocks of one row and MXFP8.
bool is_of_layout(const Checkpoint::Impl& checkpoint, const QuantizedWeight& weight) {
  const bool of_rows = checkpoint.fp8_block && checkpoint.fp8_block->at(0) == 1 &&
                       checkpoint.fp8_block->at(1) == weight.spec.group_size;
  return weight.scale_rows > 1 || is_mxfp8(weight) || weight.spec.granularity == Granularity::tensor ||
         (weight.spec.granularity == Granularity::group && of_rows);
}

// Codes of mxfp4, two in a byte, and their scales, as DeepSeek-V4 has them.
bool is_mxfp4(const StoredTensor& codes, const StoredTensor& scales) {
  const int64_t group_bytes = info(Format::mxfp4).group_size / 2;
  return codes.dtype == "I8" && scales.dtype == "F8_E8M0" && codes.shape.size() >= 2 &&
         codes.shape.back() % group_bytes == 0 && codes.shape.back() < INT64_MAX / 2 &&
         scales.shape == with_last(codes.shape, codes.shape.back() / group_bytes);
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& scales : checkpoint.tensors)
    for (const Ending& ending : {kOfWeight, kOfModule}) {
      if (!scales.name.ends_with(ending.scales)) continue;
      const std::string stem = scales.name.substr(0, scales.name.size() - ending.scales.size());
      const StoredTensor* codes = checkpoint.find(stem + std::string(ending.codes));
      if (codes == nullptr) continue;
      if (auto weight = fp8_layout_weight(checkpoint, *codes, scales))
        found.weights.push_back(*std::move(weight));
      else if (ending.scales == kOfModule.scales)
        found.not_read[codes->name] = fmt::format(
            "{} [{}] with scales {} [{}] is no fp8 in blocks of 128 x 128 or those of config.json, and "
            "neither "
            "fp8 nor mxfp4 with a scale of F8_E8M0 for 32 columns",
            codes->dtype, fmt::join(codes->shape, ", "), scales.dtype, fmt::join(scales.shape, ", "));
    }
}

}  // namespace

std::optional<QuantizedWeight> fp8_weight(const Checkpoint::Impl& checkpoint, Layout layout,
                                          const std::string& name, const StoredTensor& codes,
                                          const StoredTensor& scales) {
  const bool bytes = scales.dtype == "U8", exponents = bytes || scales.dtype == "F8_E8M0";
  const auto scale_dtype = exponents ? DType::f32 : dtype_from_safetensors(scales.dtype);
  const bool e5m2 = codes.dtype == "F8_E5M2";
  if ((codes.dtype != "F8_E4M3" && !e5m2) || codes.shape.size() < 2 || codes.shape.size() > 3 ||
      !scale_dtype || !is_floating(*scale_dtype) || *scale_dtype == DType::f64 ||
      io::num_elements(codes.shape) == 0)
    return std::nullopt;
  QuantizedWeight weight;
  weight.name = name;
  weight.shape = codes.shape;
  weight.layout = layout;
  weight.dtype = checkpoint.model_dtype;
  weight.spec.format = Format::fp8;
  weight.spec.scale_dtype = *scale_dtype;
  if (exponents) weight.exponents = scales.dtype;
  weight.e5m2_codes = e5m2;
  if (e5m2) weight.note = "codes of E5M2";
  const int64_t cols = codes.shape.back(), groups = scales.shape.empty() ? 0 : scales.shape.back();
  const auto fits = [&](Granularity granularity, int64_t group_size, int64_t scale_rows) {
    weight.spec.granularity = granularity;
    weight.spec.group_size = group_size;
    weight.scale_rows = scale_rows;
    return scale_shape(weight) == scales.shape;
  };
  if (exponents && cols % kMxfp8Group == 0 && fits(Granularity::group, kMxfp8Group, 1)) return weight;
  if (bytes) return std::nullopt;
  const auto [block_rows, block_cols] = checkpoint.fp8_block.value_or(std::array{kFp8Block, kFp8Block});
  if (fits(Granularity::tensor, QuantSpec{}.group_size, 1) ||
      fits(Granularity::channel, QuantSpec{}.group_size, 1) ||
      fits(Granularity::group, block_cols, block_rows) || fits(Granularity::group, kFp8Block, kFp8Block) ||
      (groups > 0 && cols % groups == 0 && fits(Granularity::group, cols / groups, 1)))
    return weight;
  return std::nullopt;
}

bool is_mxfp8(const QuantizedWeight& weight) {
  return !weight.exponents.empty() && weight.scale_rows == 1 &&
         weight.spec.granularity == Granularity::group && weight.spec.group_size == kMxfp8Group;
}

std::optional<QuantizedWeight> fp8_layout_weight(const Checkpoint::Impl& checkpoint,
                                                 const StoredTensor& codes, const StoredTensor& scales) {
  const bool of_module = scales.name == module_of(codes.name) + std::string(kOfModule.scales);
  if (of_module && is_mxfp4(codes, scales)) {
    QuantizedWeight weight = block_float_weight(checkpoint, Format::mxfp4, Layout::fp8, codes.name, codes);
    weight.scales_of_module = true;
    return weight;
  }
  auto weight = fp8_weight(checkpoint, Layout::fp8, codes.name, codes, scales);
  // Of one scale for all in P.scale it is not known what it is.
  if (!weight || !is_of_layout(checkpoint, *weight) ||
      (of_module && weight->spec.granularity == Granularity::tensor))
    return std::nullopt;
  weight->scales_of_module = of_module;
  for (const char* activations : {".input_scale", ".activation_scale"})
    add_activation_scale(checkpoint, module_of(codes.name) + activations, *weight);
  return weight;
}

Part fp8_codes(const QuantizedWeight& weight) {
  return {Role::codes, weight.name, weight.e5m2_codes ? "F8_E5M2" : "F8_E4M3", weight.shape};
}

Part fp8_scales(const QuantizedWeight& weight, std::string name) {
  return {Role::scales, std::move(name),
          weight.exponents.empty() ? dtype_to_safetensors(weight.spec.scale_dtype) : weight.exponents,
          scale_shape(weight)};
}

std::string refuse_written_form(const QuantizedWeight& weight) {
  const LayoutInfo& layout = layout_info(weight.layout);
  const std::span<const Granularity> granularities = granularities_of(layout, weight.spec.format);
  if (is_only_read(layout, weight.spec.format)) return info(weight.spec.format).name;
  if (weight.spec.format != Format::fp8 || granularities.empty()) return "";
  if (weight.e5m2_codes) return "codes of E5M2";
  if (!weight.exponents.empty()) return "scales of " + weight.exponents;
  if (std::ranges::find(granularities, weight.spec.granularity) == granularities.end())
    return fmt::format("a scale a {}", to_string(weight.spec.granularity));
  if (weight.spec.granularity == Granularity::group &&
      (weight.scale_rows != kFp8Block || weight.spec.group_size != kFp8Block))
    return fmt::format("blocks of {} x {}", weight.scale_rows, weight.spec.group_size);
  return "";
}

const LayoutInfo& fp8_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{.layout = Layout::fp8,
                                                    .name = "fp8",
                                                    .formats = {Format::fp8},
                                                    .granularities = {Granularity::group},
                                                    .fp8_granularities = {Granularity::group},
                                                    .scale_dtypes = ScaleDTypes::f32,
                                                    .sources = {Format::fp8, Format::mxfp4},
                                                    .apart = true,
                                                    .zero_scale_is_eps = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
