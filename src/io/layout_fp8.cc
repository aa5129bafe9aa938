// FP8 as DeepSeek published it, and Qwen and others since: codes of E4M3, and a scale for blocks of 128 x
// 128. What this, float-quantized of compressed-tensors and the FP8 of ModelOpt have in common.
#include "core/arithmetic.h"
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kScale = "_scale_inv";  // despite its name what codes are multiplied by

std::vector<Part> parts(const QuantizedWeight& weight) {
  return {{Role::codes, weight.name, "F8_E4M3", weight.shape},
          {Role::scales, weight.name + std::string(kScale), dtype_to_safetensors(weight.spec.scale_dtype),
           fp8_scale_shape(weight)}};
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& scales : checkpoint.tensors) {
    if (!scales.name.ends_with(kScale)) continue;
    const std::string name = scales.name.substr(0, scales.name.size() - kScale.size());
    const StoredTensor* codes = checkpoint.find(name);
    if (codes == nullptr) continue;
    auto weight = fp8_weight(checkpoint, Layout::fp8, name, *codes, scales);
    if (!weight || weight->scale_rows == 1) continue;
    add_activation_scale(checkpoint, module_of(name) + ".input_scale", *weight);
    found.weights.push_back(*std::move(weight));
  }
}

}  // namespace

std::optional<QuantizedWeight> fp8_weight(const Checkpoint::Impl& checkpoint, Layout layout,
                                          const std::string& name, const StoredTensor& codes,
                                          const StoredTensor& scales) {
  const auto scale_dtype = dtype_from_safetensors(scales.dtype);
  if (codes.dtype != "F8_E4M3" || codes.shape.size() < 2 || codes.shape.size() > 3 || !scale_dtype ||
      !is_floating(*scale_dtype) || *scale_dtype == DType::f64 || io::num_elements(codes.shape) == 0)
    return std::nullopt;
  QuantizedWeight weight;
  weight.name = name;
  weight.shape = codes.shape;
  weight.layout = layout;
  weight.dtype = checkpoint.model_dtype;
  weight.spec.format = Format::fp8;
  weight.spec.scale_dtype = *scale_dtype;
  const int64_t cols = codes.shape.back(), groups = scales.shape.empty() ? 0 : scales.shape.back();
  const auto fits = [&](Granularity granularity, int64_t group_size, int64_t scale_rows) {
    weight.spec.granularity = granularity;
    weight.spec.group_size = group_size;
    weight.scale_rows = scale_rows;
    return fp8_scale_shape(weight) == scales.shape;
  };
  if (fits(Granularity::tensor, QuantSpec{}.group_size, 1) ||
      fits(Granularity::channel, QuantSpec{}.group_size, 1) ||
      fits(Granularity::group, kFp8Block, kFp8Block) ||
      (groups > 0 && cols % groups == 0 && fits(Granularity::group, cols / groups, 1)))
    return weight;
  return std::nullopt;
}

std::vector<int64_t> fp8_scale_shape(const QuantizedWeight& weight) {
  if (weight.spec.granularity == Granularity::tensor)
    return weight.layout == Layout::modelopt ? std::vector<int64_t>{} : std::vector<int64_t>{1};
  std::vector<int64_t> shape = with_last(weight.shape, weight.quant_shape().groups_per_row);
  int64_t& rows = shape[shape.size() - 2];
  rows = ceil_div(rows, weight.scale_rows);
  return shape;
}

const LayoutInfo& fp8_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{.layout = Layout::fp8,
                                                    .name = "fp8",
                                                    .formats = {Format::fp8},
                                                    .granularities = {Granularity::group},
                                                    .fp8_granularities = {Granularity::group},
                                                    .scale_dtypes = ScaleDTypes::f32,
                                                    .is_source = true,
                                                    .apart = true,
                                                    .zero_scale_is_eps = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
