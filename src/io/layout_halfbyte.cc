// Our own layout: the native bytes of every format, beside a JSON text that describes the weight.
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kSpec = ".quant_spec";
constexpr int64_t kVersion = 1;

bool grouped(Granularity granularity) {
  return granularity == Granularity::group || granularity == Granularity::flat;
}

std::string spec_json(const QuantizedWeight& weight) {
  const QuantSpec& spec = weight.spec;
  std::string json =
      fmt::format(R"({{"version":{},"format":"{}","asymmetric":{},"granularity":"{}")", kVersion,
                  info(spec.format).name, spec.asymmetric, to_string(spec.granularity));
  if (grouped(spec.granularity)) json += fmt::format(R"(,"group_size":{})", spec.group_size);
  if (weight.encoding && weight.encoding->scale_rule)
    json += fmt::format(R"(,"scale_rule":"{}")", to_string(*weight.encoding->scale_rule));
  json += fmt::format(R"(,"scale_dtype":"{}","double_quant":{},"shape":[{}],"dtype":"{}")",
                      to_string(spec.scale_dtype), spec.double_quant, fmt::join(weight.shape, ","),
                      to_string(weight.dtype));
  // A space or a minus: the length is the same for all offsets.
  if (spec.double_quant) json += fmt::format(R"(,"scales_offset":{: .16e})", weight.scales_offset);
  return json + "}";
}

std::vector<Part> parts(const QuantizedWeight& weight) {
  const QuantSpec& spec = weight.spec;
  const QuantShape shape = weight.quant_shape();
  const bool flat = spec.granularity == Granularity::flat, tensor = spec.granularity == Granularity::tensor;
  const std::string& name = weight.name;
  const std::vector<int64_t> codes =
      flat ? std::vector<int64_t>{shape.row_bytes} : with_last(weight.shape, shape.row_bytes);
  const std::vector<int64_t> scales =
      flat || tensor ? std::vector<int64_t>{shape.num_groups} : with_last(weight.shape, shape.groups_per_row);
  const char* dtype = dtype_to_safetensors(spec.scale_dtype);
  const std::string json = spec_json(weight);
  std::vector<Part> parts = {{Role::codes, name, "U8", codes},
                             {Role::scales, name + ".scales", spec.double_quant ? "U8" : dtype, scales}};
  if (has_zeros(spec)) parts.push_back({Role::zeros, name + ".zeros", "U8", scales});
  if (has_biases(spec)) parts.push_back({Role::biases, name + ".biases", dtype, scales});
  if (spec.double_quant)
    parts.push_back({Role::scales_absmax,
                     name + ".scales_absmax",
                     "F32",
                     {(shape.num_groups + kDoubleQuantBlock - 1) / kDoubleQuantBlock}});
  if (spec.format == Format::lut4)
    parts.push_back({Role::constant,
                     name + ".table",
                     "F32",
                     {16},
                     std::string(reinterpret_cast<const char*>(spec.table.data()), sizeof spec.table)});
  if (has_global_scale(spec))
    parts.push_back({Role::constant,
                     name + ".global_scale",
                     "F32",
                     {1},
                     std::string(reinterpret_cast<const char*>(&weight.global_scale), sizeof(float))});
  parts.push_back(
      {Role::constant, name + std::string(kSpec), "U8", {static_cast<int64_t>(json.size())}, json});
  return parts;
}

Granularity parse_granularity(const std::string& word) {
  for (const Granularity value : halfbyte_layout().granularities)
    if (word == to_string(value)) return value;
  HALFBYTE_FAIL(bad_input, "unknown granularity \"{}\"", printable(word));
}

QuantSpec read_spec(const nlohmann::json& json, const std::string& what) {
  QuantSpec spec;
  spec.format = find_format(json_string(json, "format", what)).format;
  spec.asymmetric = json_flag(json, "asymmetric", what);
  spec.granularity = parse_granularity(json_string(json, "granularity", what));
  if (grouped(spec.granularity)) spec.group_size = json_integer(json, "group_size", what);
  spec.scale_dtype = parse_dtype(json_string(json, "scale_dtype", what));
  spec.double_quant = json_flag(json, "double_quant", what);
  return spec;
}

// Tells how the codes were chosen, which decoding does not need: what is not known is passed over.
std::optional<Encoding> read_encoding(const nlohmann::json& json) {
  const auto rule = json.find("scale_rule");
  if (rule == json.end() || !rule->is_string()) return std::nullopt;
  for (const ScaleRule value : {ScaleRule::absmax, ScaleRule::half_range, ScaleRule::signed_max,
                                ScaleRule::minmax, ScaleRule::mlx_edge})
    if (*rule == to_string(value)) return Encoding{value};
  return std::nullopt;
}

QuantizedWeight read_weight(const Checkpoint::Impl& checkpoint, const StoredTensor& blob) {
  const std::string what = fmt::format("tensor \"{}\"", printable(blob.name));
  const auto json = parse_json<nlohmann::json>(checkpoint.read_text(blob), what);
  const int64_t version = json_integer(json, "version", what);
  HALFBYTE_CHECK(version == kVersion, bad_input, "{}: version {} is not supported, only {}", what, version,
                 kVersion);
  QuantizedWeight weight;
  weight.layout = Layout::halfbyte;
  weight.name = blob.name.substr(0, blob.name.size() - kSpec.size());
  weight.shape = json_shape(json, "shape", what);
  try {
    weight.spec = read_spec(json, what);
    weight.encoding = read_encoding(json);
    weight.dtype = parse_dtype(json_string(json, "dtype", what));
    if (weight.spec.format == Format::lut4) {
      const StoredTensor* table = checkpoint.find(weight.name + ".table");
      HALFBYTE_CHECK(
          table != nullptr && table->dtype == "F32" && table->num_bytes == sizeof weight.spec.table,
          bad_input, "{}: no \"{}.table\" of 16 values of F32 beside it", what, printable(weight.name));
      checkpoint.read(*table, 0, std::as_writable_bytes(std::span(weight.spec.table)));
    }
    check_spec(weight.spec);
    if (has_global_scale(weight.spec))
      weight.global_scale = read_f32(checkpoint, weight.name + ".global_scale", what);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage) throw;
    HALFBYTE_FAIL(bad_input, "{}: {}", what, error.what());  // an unknown word is the file's fault here
  }
  for (const DType dtype : {weight.dtype, weight.spec.scale_dtype})
    HALFBYTE_CHECK(
        (is_floating(dtype) && dtype != DType::f64) || info(weight.spec.format).scale_dtype == dtype,
        bad_input, "{}: dtypes must be f32, f16 or bf16, got {}", what, to_string(dtype));
  if (weight.spec.double_quant)
    weight.scales_offset = static_cast<float>(json_number(json, "scales_offset", what));
  return weight;
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& tensor : checkpoint.tensors)
    if (tensor.name.ends_with(kSpec)) found.weights.push_back(read_weight(checkpoint, tensor));
}

}  // namespace

const LayoutInfo& halfbyte_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{
      .layout = Layout::halfbyte,
      .name = "halfbyte",
      .asymmetric = true,
      .double_quant = true,
      .granularities = {Granularity::group, Granularity::channel, Granularity::tensor, Granularity::flat},
      .default_group_size = 64,
      .parts = parts,
      .match = match};
  return layout;
}

}  // namespace halfbyte::io
