// NVIDIA Model Optimizer. NVFP4: the bytes of compressed-tensors under other names, and the reciprocal of the
// global scale. FP8: a scale for the tensor.
#include "core/checks.h"
#include "io/checkpoint.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kScale = "_scale", kGlobal = "_scale_2";

std::vector<Part> parts(const QuantizedWeight& weight) {
  const std::string& name = weight.name;
  if (weight.spec.format == Format::fp8)
    return {fp8_codes(weight), fp8_scales(weight, name + std::string(kScale))};
  return {{Role::codes, name, "U8", with_last(weight.shape, weight.shape.back() / 2)},
          {Role::scales, name + std::string(kScale), "F8_E4M3",
           with_last(weight.shape, weight.quant_shape().groups_per_row)},
          {Role::constant,
           name + std::string(kGlobal),
           "F32",
           {},
           std::string(reinterpret_cast<const char*>(&weight.global_reciprocal), sizeof(float))}};
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& scale : checkpoint.tensors) {
    if (!scale.name.ends_with(kScale)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScale.size());
    const StoredTensor* codes = checkpoint.find(name);
    if (codes == nullptr) continue;
    if (scale.dtype == "F32" && scale.shape.empty())
      if (auto weight = fp8_weight(checkpoint, Layout::modelopt, name, *codes, scale)) {
        add_activation_scale(checkpoint, module_of(name) + ".input_scale", *weight);
        found.weights.push_back(*std::move(weight));
      }
    if (codes->dtype != "U8" || scale.dtype != "F8_E4M3") continue;
    QuantizedWeight weight = block_float_weight(checkpoint, Format::nvfp4, Layout::modelopt, name, *codes);
    const std::string what = fmt::format("weight \"{}\"", printable(name));
    weight.global_reciprocal = read_f32(checkpoint, name + std::string(kGlobal), what);
    weight.global_scale = 1 / weight.global_reciprocal;
    add_activation_scale(checkpoint, module_of(name) + ".input_scale", weight);
    found.weights.push_back(std::move(weight));
  }
}

}  // namespace

const LayoutInfo& modelopt_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{.layout = Layout::modelopt,
                                                    .name = "modelopt",
                                                    .formats = {Format::nvfp4, Format::fp8},
                                                    .granularities = {Granularity::group},
                                                    .default_group_size = 16,
                                                    .fp8_granularities = {Granularity::tensor},
                                                    .whole_groups = true,
                                                    .scale_dtypes = ScaleDTypes::f32,
                                                    .sources = {Format::nvfp4, Format::fp8},
                                                    .apart = true,
                                                    .zero_scale_is_eps = true,
                                                    .global_is_reciprocal = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
