// The affine quantization of MLX. Its tensors fit several bit widths and group sizes: config.json tells, or
// the metadata of a file that stands alone. Its modes of floats, which are only read, have a byte for a
// scale; their shapes tell the mode.
#include <algorithm>

#include "core/checks.h"
#include "core/format.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kScales = ".scales";

struct FloatMode {
  const char* name;
  Format format;
  int64_t group_size;
};
constexpr FloatMode kFloatModes[] = {
    {"mxfp4", Format::mxfp4, 32}, {"mxfp8", Format::fp8, kMxfp8Group}, {"nvfp4", Format::nvfp4, 16}};

std::vector<Part> parts(const QuantizedWeight& weight) {
  const QuantShape shape = weight.quant_shape();
  const std::string module = module_of(weight.name);
  if (!has_biases(weight.spec))
    return {{Role::codes, module + ".weight", "U32", with_last(weight.shape, shape.row_bytes / 4)},
            {Role::scales, module + ".scales", "U8", with_last(weight.shape, shape.groups_per_row)}};
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

// The mode that config.json names for a module; empty: none.
std::string mode_of(const MlxGrids& grids, const std::string& module) {
  if (const auto own = grids.modules.find(module); own != grids.modules.end()) return own->second.mode;
  return grids.all ? grids.all->mode : "";
}

// Of codes and scales without biases. Nothing where they are of no mode, and why.
std::optional<QuantizedWeight> float_weight(const Checkpoint::Impl& checkpoint, const std::string& named,
                                            const StoredTensor& codes, const StoredTensor& scales,
                                            std::string& why_not) {
  const int64_t words = codes.shape.empty() ? 0 : codes.shape.back(),
                groups = scales.shape.empty() ? 0 : scales.shape.back();
  const auto fits = [&](const FloatMode& mode) {
    const int64_t group_words = mode.group_size * info(mode.format).bits / 32;
    return words > 0 && words < INT64_MAX / 32 && words % group_words == 0 && words / group_words == groups;
  };
  if (checkpoint.find(module_of(codes.name) + ".global_scale") != nullptr) {
    why_not = "each expert has a global scale of its own (global_scale)";
    return std::nullopt;
  }
  const auto* const mode = std::ranges::find_if(kFloatModes, fits);
  if (mode == std::end(kFloatModes) || (!named.empty() && named != mode->name)) {
    why_not = fmt::format("rows of {} words and {} scales of a byte are read as {}, and the config {}", words,
                          groups, mode == std::end(kFloatModes) ? "none of MLX" : mode->name,
                          named.empty() ? "names no mode" : "says mode " + printable(named));
    return std::nullopt;
  }
  QuantizedWeight weight;
  weight.layout = Layout::mlx;
  weight.name = codes.name;
  weight.dtype = checkpoint.model_dtype;
  weight.shape = with_last(codes.shape, words * 32 / info(mode->format).bits);
  weight.spec.format = mode->format;
  weight.spec.group_size = mode->group_size;
  weight.spec.scale_dtype = info(mode->format).scale_dtype.value_or(DType::f32);
  if (mode->format == Format::fp8) weight.exponents = scales.dtype;
  return weight;
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  std::optional<MlxGrids> grids;
  for (const StoredTensor& scales : checkpoint.tensors) {
    if (!scales.name.ends_with(kScales)) continue;
    const std::string module = scales.name.substr(0, scales.name.size() - kScales.size());
    const StoredTensor* codes = checkpoint.find(module + ".weight");
    const bool affine = checkpoint.find(module + ".biases") != nullptr;
    if (codes == nullptr || codes->dtype != "U32" || (!affine && scales.dtype != "U8")) continue;
    if (!grids) grids = read_grids(checkpoint);
    if (affine) {
      found.weights.push_back(read_weight(checkpoint, *grids, module, *codes, scales));
      continue;
    }
    std::string why_not;
    if (auto weight = float_weight(checkpoint, mode_of(*grids, module), *codes, scales, why_not))
      found.weights.push_back(*std::move(weight));
    else
      found.not_read[codes->name] = why_not;
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
                      .sources = {Format::mxfp4, Format::fp8, Format::nvfp4},
                      .parts = parts,
                      .match = match};
  return layout;
}

}  // namespace halfbyte::io
