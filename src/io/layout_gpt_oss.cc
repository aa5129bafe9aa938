// MXFP4 of gpt-oss: the experts of a layer in one tensor [E, out, in], codes of 32 in 16 bytes each. The
// model has the transpose, and the rows of gate and up take turns.
#include "core/checks.h"
#include "io/checkpoint.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kBlocks = "_blocks", kScales = "_scales";
constexpr int64_t kBlockBytes = 16;

std::vector<Part> parts(const QuantizedWeight& weight) {
  const int64_t groups = weight.quant_shape().groups_per_row;
  std::vector<int64_t> scales = with_last(weight.shape, groups), blocks = scales;
  blocks.push_back(kBlockBytes);
  return {{Role::codes, weight.name + std::string(kBlocks), "U8", blocks},
          {Role::scales, weight.name + std::string(kScales), "U8", scales}};
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& codes : checkpoint.tensors) {
    if (!codes.name.ends_with(kBlocks) || codes.dtype != "U8" || codes.shape.size() != 4 ||
        codes.shape.back() != kBlockBytes || codes.shape[2] > INT64_MAX / (2 * kBlockBytes))
      continue;
    const std::string name = codes.name.substr(0, codes.name.size() - kBlocks.size());
    const StoredTensor* scales = checkpoint.find(name + std::string(kScales));
    if (scales == nullptr || scales->dtype != "U8") continue;
    QuantizedWeight weight;
    weight.name = name;
    weight.shape = {codes.shape[0], codes.shape[1], codes.shape[2] * 2 * kBlockBytes};
    weight.layout = Layout::gpt_oss;
    weight.dtype = checkpoint.model_dtype;
    weight.spec.format = Format::mxfp4;
    weight.spec.group_size = info(Format::mxfp4).group_size;
    weight.spec.scale_dtype = *info(Format::mxfp4).scale_dtype;
    found.weights.push_back(std::move(weight));
  }
}

}  // namespace

const LayoutInfo& gpt_oss_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{.layout = Layout::gpt_oss,
                                                    .name = "gpt-oss",
                                                    .formats = {Format::mxfp4},
                                                    .granularities = {Granularity::group},
                                                    .default_group_size = 32,
                                                    .whole_groups = true,
                                                    .sources = {Format::mxfp4},
                                                    .turns_experts = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
