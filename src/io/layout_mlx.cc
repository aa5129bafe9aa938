// The affine quantization of MLX. Its tensors fit several bit widths and group sizes: config.json tells, or
// the metadata of a file that stands alone.
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kScales = ".scales";

std::vector<Part> parts(const QuantizedWeight& weight) {
  const QuantShape shape = weight.quant_shape();
  const std::string module = module_of(weight.name);
  const char* dtype = dtype_to_safetensors(weight.dtype);
  const std::vector<int64_t> scales = with_last(weight.shape, shape.groups_per_row);
  return {{Role::codes, module + ".weight", "U32", with_last(weight.shape, shape.row_bytes / 4)},
          {Role::scales, module + ".scales", dtype, scales},
          {Role::biases, module + ".biases", dtype, scales}};
}

MlxGrids read_grids(const Checkpoint::Impl& checkpoint) {
  if (!checkpoint.config.empty())
    if (MlxGrids grids = mlx_grids_of_config(checkpoint.config); grids.all || !grids.modules.empty())
      return grids;
  for (const auto& file : checkpoint.files)
    for (const auto& [key, value] : file.metadata)
      if (key == "quantization") return mlx_grids(value);
  return {};
}

QuantizedWeight read_weight(const Checkpoint::Impl& checkpoint, const MlxGrids& grids,
                            const std::string& module, const StoredTensor& codes,
                            const StoredTensor& scales) {
  QuantizedWeight weight;
  weight.layout = Layout::mlx;
  weight.name = codes.name;
  const auto own = grids.modules.find(module);
  HALFBYTE_CHECK(
      own != grids.modules.end() || grids.all, bad_input,
      "tensor \"{}\": its bits and group size must stand in the \"quantization\" of config.json or of the "
      "metadata of {}",
      printable(codes.name), printable(checkpoint.path));
  const MlxGrid grid = own != grids.modules.end() ? own->second : *grids.all;
  weight.spec.format = mlx_format(grid.bits, codes.name);
  weight.spec.group_size = grid.group_size;
  const auto dtype = dtype_from_safetensors(scales.dtype);
  HALFBYTE_CHECK(dtype && is_floating(*dtype) && *dtype != DType::f64, bad_input,
                 "tensor \"{}\" must be F32, F16 or BF16, got {}", printable(scales.name), scales.dtype);
  weight.dtype = weight.spec.scale_dtype = *dtype;
  const int64_t words = codes.shape.empty() ? 0 : codes.shape.back();
  HALFBYTE_CHECK(!codes.shape.empty() && words < INT64_MAX / 32 && words * 32 % grid.bits == 0 &&
                     grid.group_size > 0 && words * 32 / grid.bits % grid.group_size == 0,
                 bad_input, "tensor \"{}\": rows of {} words are no whole groups of {} codes of {} bits",
                 printable(codes.name), words, grid.group_size, grid.bits);
  weight.shape = with_last(codes.shape, words * 32 / grid.bits);
  return weight;
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  std::optional<MlxGrids> grids;
  for (const StoredTensor& scales : checkpoint.tensors) {
    if (!scales.name.ends_with(kScales)) continue;
    const std::string module = scales.name.substr(0, scales.name.size() - kScales.size());
    const StoredTensor* codes = checkpoint.find(module + ".weight");
    if (codes == nullptr || codes->dtype != "U32" || checkpoint.find(module + ".biases") == nullptr) continue;
    if (!grids) grids = read_grids(checkpoint);
    found.weights.push_back(read_weight(checkpoint, *grids, module, *codes, scales));
  }
}

}  // namespace

Format mlx_format(int bits, const std::string& tensor) {
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::affine && format.bits == bits) return format.format;
  HALFBYTE_FAIL(bad_input, "tensor \"{}\": MLX has no {} bits", printable(tensor), bits);
}

const LayoutInfo& mlx_layout() {
  static const LayoutInfo& layout =
      *new LayoutInfo{.layout = Layout::mlx,
                      .name = "mlx",
                      .formats = {Format::affine2, Format::affine3, Format::affine4, Format::affine5,
                                  Format::affine6, Format::affine8},
                      .granularities = {Granularity::group},
                      .group_sizes = {32, 64, 128},
                      .default_group_size = 64,
                      .whole_groups = true,
                      .scale_rules = {ScaleRule::mlx_edge, ScaleRule::minmax},
                      .scale_dtypes = ScaleDTypes::of_weight,
                      .code_scale = CodeScale::unrounded,
                      .parts = parts,
                      .match = match};
  return layout;
}

}  // namespace halfbyte::io
