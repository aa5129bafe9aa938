// FP8 as DeepSeek published it, and Qwen and others since: codes of E4M3, and a scale for blocks of 128 x
// 128. Other blocks, a scale for the tensor and scales that are exponents are read. What this,
// float-quantized of compressed-tensors and the FP8 of ModelOpt have in common.
#include <algorithm>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kScale = "_scale_inv";  // despite its name what codes are multiplied by

std::vector<Part> parts(const QuantizedWeight& weight) {
  return {fp8_codes(weight), fp8_scales(weight, weight.name + std::string(kScale))};
}

std::vector<int64_t> scale_shape(const QuantizedWeight& weight) {
  if (weight.spec.granularity == Granularity::tensor)
    return weight.layout == Layout::compressed_tensors ? std::vector<int64_t>{1} : std::vector<int64_t>{};
  std::vector<int64_t> shape = with_last(weight.shape, weight.quant_shape().groups_per_row);
  int64_t& rows = shape[shape.size() - 2];
  rows = ceil_div(rows, weight.scale_rows);
  return shape;
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& scales : checkpoint.tensors) {
    if (!scales.name.ends_with(kScale)) continue;
    const std::string name = scales.name.substr(0, scales.name.size() - kScale.size());
    const StoredTensor* codes = checkpoint.find(name);
    if (codes == nullptr) continue;
    auto weight = fp8_weight(checkpoint, Layout::fp8, name, *codes, scales);
    if (!weight || !is_of_fp8_layout(checkpoint, *weight)) continue;
    for (const char* activations : {".input_scale", ".activation_scale"})
      add_activation_scale(checkpoint, module_of(name) + activations, *weight);
    found.weights.push_back(*std::move(weight));
  }
}

}  // namespace

std::optional<QuantizedWeight> fp8_weight(const Checkpoint::Impl& checkpoint, Layout layout,
                                          const std::string& name, const StoredTensor& codes,
                                          const StoredTensor& scales) {
  const bool e8m0 = scales.dtype == "F8_E8M0";
  const auto scale_dtype = e8m0 ? DType::f32 : dtype_from_safetensors(scales.dtype);
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
  weight.e8m0_scales = e8m0;
  weight.e5m2_codes = e5m2;
  if (e5m2) weight.note = "codes of E5M2";
  const int64_t cols = codes.shape.back(), groups = scales.shape.empty() ? 0 : scales.shape.back();
  const auto fits = [&](Granularity granularity, int64_t group_size, int64_t scale_rows) {
    weight.spec.granularity = granularity;
    weight.spec.group_size = group_size;
    weight.scale_rows = scale_rows;
    return scale_shape(weight) == scales.shape;
  };
  const auto [block_rows, block_cols] = checkpoint.fp8_block.value_or(std::array{kFp8Block, kFp8Block});
  if (fits(Granularity::tensor, QuantSpec{}.group_size, 1) ||
      fits(Granularity::channel, QuantSpec{}.group_size, 1) ||
      fits(Granularity::group, block_cols, block_rows) || fits(Granularity::group, kFp8Block, kFp8Block) ||
      (groups > 0 && cols % groups == 0 && fits(Granularity::group, cols / groups, 1)))
    return weight;
  return std::nullopt;
}

bool is_of_fp8_layout(const Checkpoint::Impl& checkpoint, const QuantizedWeight& weight) {
  const bool of_rows = checkpoint.fp8_block && checkpoint.fp8_block->at(0) == 1 &&
                       checkpoint.fp8_block->at(1) == weight.spec.group_size;
  return weight.scale_rows > 1 || weight.spec.granularity == Granularity::tensor ||
         (weight.spec.granularity == Granularity::group && of_rows);
}

Part fp8_codes(const QuantizedWeight& weight) {
  return {Role::codes, weight.name, weight.e5m2_codes ? "F8_E5M2" : "F8_E4M3", weight.shape};
}

Part fp8_scales(const QuantizedWeight& weight, std::string name) {
  return {Role::scales, std::move(name),
          weight.e8m0_scales ? "F8_E8M0" : dtype_to_safetensors(weight.spec.scale_dtype),
          scale_shape(weight)};
}

std::string refuse_written_form(const QuantizedWeight& weight) {
  const LayoutInfo& layout = layout_info(weight.layout);
  const std::span<const Granularity> granularities = granularities_of(layout, weight.spec.format);
  if (weight.spec.format != Format::fp8 || granularities.empty()) return "";
  if (weight.e5m2_codes) return "codes of E5M2";
  if (weight.e8m0_scales) return "scales of F8_E8M0";
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
                                                    .sources = {Format::fp8},
                                                    .apart = true,
                                                    .zero_scale_is_eps = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
