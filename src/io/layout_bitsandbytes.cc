// The 4-bit state dictionary of bitsandbytes: flat blocks, the first element in the high nibble, and a JSON
// text in a tensor whose name tells the format.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "core/format.h"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr const char* kStateInfix = ".quant_state.bitsandbytes__";

std::string bytes_of(std::span<const float> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

// Every number has the same length for all scales_offset: the size is fixed before the scales are known.
std::string state_json(const QuantizedWeight& weight) {
  std::string json = fmt::format(R"({{"quant_type": "{}", "blocksize": {}, "dtype": "{}", "shape": [{}])",
                                 info(weight.spec.format).name, weight.spec.group_size,
                                 torch_name(weight.dtype), fmt::join(weight.shape, ", "));
  if (weight.spec.double_quant)
    json += fmt::format(R"(, "nested_blocksize": {}, "nested_dtype": "float32", "nested_offset": {:.16e})",
                        kDoubleQuantBlock, weight.scales_offset);
  return json + "}";
}

std::vector<Part> parts(const QuantizedWeight& weight) {
  const QuantShape shape = weight.quant_shape();
  const int64_t code_size = safetensors_dtype_bits(weight.codes_dtype) / 8;
  const std::string& name = weight.name;
  const std::string state = state_json(weight);
  std::vector<Part> parts = {
      {Role::codes, name, weight.codes_dtype, {(shape.row_bytes + code_size - 1) / code_size, 1}},
      {Role::scales, name + ".absmax", weight.spec.double_quant ? "U8" : "F32", {shape.num_groups}},
      {Role::constant, name + ".quant_map", "F32", {16}, bytes_of(table_values(weight.spec.format))}};
  if (weight.spec.double_quant) {
    const int64_t num_blocks = (shape.num_groups + kDoubleQuantBlock - 1) / kDoubleQuantBlock;
    parts.push_back({Role::scales_absmax, name + ".nested_absmax", "F32", {num_blocks}});
    parts.push_back({Role::constant,
                     name + ".nested_quant_map",
                     "F32",
                     {256},
                     weight.scales_map.empty() ? bytes_of({double_quant_map(), size_t{256}})
                                               : bytes_of(weight.scales_map)});
  }
  parts.push_back({Role::constant,
                   name + kStateInfix + info(weight.spec.format).name,
                   "U8",
                   {static_cast<int64_t>(state.size())},
                   state});
  return parts;
}

std::vector<float> read_map(const Checkpoint::Impl& checkpoint, const std::string& name, size_t num_values) {
  const StoredTensor* tensor = checkpoint.find(name);
  HALFBYTE_CHECK(
      tensor != nullptr && tensor->dtype == "F32" && tensor->num_bytes == num_values * sizeof(float),
      bad_input, "tensor \"{}\" must exist with {} values of F32", printable(name), num_values);
  std::vector<float> values(num_values);
  checkpoint.read(*tensor, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

// The kernels of bitsandbytes use their own table, whatever the file says: both must be the same.
void check_quant_map(const std::vector<float>& map, const QuantizedWeight& weight) {
  const auto table = table_values(weight.spec.format);
  for (size_t i = 0; i < map.size(); ++i)
    HALFBYTE_CHECK(std::abs(map[i] - table[i]) <= 1e-6f, bad_input,
                   "tensor \"{}.quant_map\": value {} is {}, but {} has {}", printable(weight.name), i,
                   map[i], info(weight.spec.format).name, table[i]);
}

QuantizedWeight read_state(const Checkpoint::Impl& checkpoint, const StoredTensor& state, size_t infix) {
  const std::string what = fmt::format("tensor \"{}\"", printable(state.name));
  QuantizedWeight weight;
  weight.layout = Layout::bitsandbytes;
  weight.name = state.name.substr(0, infix);
  const std::string type = state.name.substr(infix + std::strlen(kStateInfix));
  HALFBYTE_CHECK(type == "nf4" || type == "fp4", bad_input, "{}: unknown type \"{}\"", what, printable(type));
  const auto json = parse_json<nlohmann::json>(checkpoint.read_text(state), what);
  HALFBYTE_CHECK(json_string(json, "quant_type", what) == type, bad_input,
                 "{}: \"quant_type\" differs from the name", what);
  const auto dtype = dtype_from_torch(json_string(json, "dtype", what));
  HALFBYTE_CHECK(dtype.has_value(), bad_input, "{}: \"dtype\" must be float32, float16 or bfloat16", what);
  weight.dtype = *dtype;
  weight.shape = json_shape(json, "shape", what);
  weight.spec.format = find_format(type).format;
  weight.spec.granularity = Granularity::flat;
  weight.spec.group_size = json_integer(json, "blocksize", what);
  const auto& sizes = bitsandbytes_layout().group_sizes;
  HALFBYTE_CHECK(std::ranges::find(sizes, weight.spec.group_size) != sizes.end(), bad_input,
                 "{}: \"blocksize\" must be one of {}, got {}", what, fmt::join(sizes, ", "),
                 weight.spec.group_size);
  check_quant_map(read_map(checkpoint, weight.name + ".quant_map", 16), weight);

  weight.spec.double_quant = checkpoint.find(weight.name + ".nested_absmax") != nullptr;
  if (weight.spec.double_quant) {
    HALFBYTE_CHECK(json_integer(json, "nested_blocksize", what) == kDoubleQuantBlock, bad_input,
                   "{}: \"nested_blocksize\" must be {}", what, kDoubleQuantBlock);
    weight.scales_offset = static_cast<float>(json_number(json, "nested_offset", what));
    weight.scales_map = read_map(checkpoint, weight.name + ".nested_quant_map", 256);
  }
  // Sharded training stores the same bytes as floats (quant_storage).
  if (const StoredTensor* codes = checkpoint.find(weight.name))
    if (codes->dtype == "BF16" || codes->dtype == "F16" || codes->dtype == "F32")
      weight.codes_dtype = codes->dtype;
  return weight;
}

void match(const Checkpoint::Impl& checkpoint, FoundWeights& found) {
  for (const StoredTensor& tensor : checkpoint.tensors)
    if (const size_t infix = tensor.name.find(kStateInfix); infix != std::string::npos)
      found.weights.push_back(read_state(checkpoint, tensor, infix));
}

}  // namespace

const LayoutInfo& bitsandbytes_layout() {
  static const LayoutInfo& layout = *new LayoutInfo{.layout = Layout::bitsandbytes,
                                                    .name = "bitsandbytes",
                                                    .formats = {Format::nf4, Format::fp4},
                                                    .double_quant = true,
                                                    .granularities = {Granularity::flat},
                                                    .group_sizes = {32, 64, 128, 256, 512, 1024, 2048, 4096},
                                                    .default_group_size = 64,
                                                    .scale_rules = {ScaleRule::absmax},
                                                    .scale_dtypes = ScaleDTypes::f32,
                                                    .many_specs = false,
                                                    .turns_conv1d = true,
                                                    .high_nibble_first = true,
                                                    .parts = parts,
                                                    .match = match};
  return layout;
}

}  // namespace halfbyte::io
