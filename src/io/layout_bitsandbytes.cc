// The 4-bit state dictionary of bitsandbytes: flat blocks, the first element in the high nibble, and a JSON
// text in a tensor whose name tells the format. Experts may be stored as the module Experts4bit has them: the
// same codes and scales as [experts, bytes] and [experts, groups], and no such text.
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

// The parameters of Experts4bit, and the buffers with their scales.
constexpr std::string_view kGateUp = ".gate_up_proj", kDown = ".down_proj", kProjection = "_proj",
                           kAbsmax = "_absmax";

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
  if (weight.experts4bit) {
    const int64_t experts = weight.shape[0];
    return {{Role::codes, weight.name, "U8", {experts, shape.row_bytes / experts}},
            {Role::scales, experts4bit_scales(weight.name), "F32", {experts, shape.num_groups / experts}}};
  }
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
  for (const StoredTensor& tensor : checkpoint.tensors) {
    if (const size_t infix = tensor.name.find(kStateInfix); infix != std::string::npos)
      found.weights.push_back(read_state(checkpoint, tensor, infix));
    if (tensor.dtype != "U8" || tensor.shape.size() != 2) continue;
    const StoredTensor* scales = checkpoint.find(experts4bit_scales(tensor.name));
    if (scales == nullptr) continue;
    std::string why_not;
    if (auto weight = experts4bit_weight(checkpoint, tensor, *scales, why_not))
      found.weights.push_back(*std::move(weight));
    else
      found.not_read[tensor.name] = why_not;
  }
}

}  // namespace

std::string experts4bit_scales(const std::string& name) {
  if (!name.ends_with(kGateUp) && !name.ends_with(kDown)) return "";
  return name.substr(0, name.size() - kProjection.size()) + std::string(kAbsmax);
}

int64_t experts4bit_hidden_size(const QuantizedWeight& weight) {
  return weight.name.ends_with(kDown) ? weight.shape[1] : weight.shape[2];
}

std::string refuse_experts4bit(const QuantizedWeight& weight) {
  if (weight.spec.double_quant) return "Experts4bit has no double quantization";
  if (experts4bit_scales(weight.name).empty()) return "Experts4bit has gate_up_proj and down_proj only";
  if (weight.cols() % weight.spec.group_size != 0)
    return fmt::format("Experts4bit has whole groups in a row: {} columns are not a multiple of {}",
                       weight.cols(), weight.spec.group_size);
  return "";
}

std::optional<QuantizedWeight> experts4bit_weight(const Checkpoint::Impl& checkpoint,
                                                  const StoredTensor& codes, const StoredTensor& scales,
                                                  std::string& why_not) {
  const auto refuse = [&](std::string reason) {
    why_not = std::move(reason);
    return std::nullopt;
  };
  if (codes.shape.size() != 2 || scales.shape.size() != 2 || scales.dtype != "F32" ||
      codes.shape[0] != scales.shape[0] || codes.num_bytes == 0 || scales.num_bytes == 0 ||
      codes.shape[1] > INT64_MAX / 2)
    return refuse(fmt::format("\"{}\" {} [{}] does not fit codes [{}]: it must be F32 [experts, groups]",
                              printable(scales.name), scales.dtype, fmt::join(scales.shape, ", "),
                              fmt::join(codes.shape, ", ")));
  const int64_t experts = codes.shape[0], n = 2 * codes.shape[1], group_size = n / scales.shape[1];
  const auto& sizes = bitsandbytes_layout().group_sizes;
  if (n % scales.shape[1] != 0 || std::ranges::find(sizes, group_size) == sizes.end())
    return refuse(fmt::format("\"{}\" has {} scales for {} codes: groups must be of {}",
                              printable(scales.name), scales.shape[1], n, fmt::join(sizes, ", ")));
  if (checkpoint.config.empty())
    return refuse(
        "the format and the shape of experts as Experts4bit are in config.json, which there is not");
  const Experts4bitConfig config = experts4bit_config(checkpoint.config);
  if (!config.format || !config.hidden_size)
    return refuse(fmt::format("config.json has no {} for experts as Experts4bit",
                              config.format ? "hidden_size" : "bnb_4bit_quant_type of nf4 or fp4"));
  const int64_t hidden = *config.hidden_size, other = n / hidden;
  if (n % hidden != 0)
    return refuse(fmt::format("{} codes of an expert are no rows of hidden_size {}", n, hidden));
  QuantizedWeight weight;
  weight.layout = Layout::bitsandbytes;
  weight.name = codes.name;
  weight.shape = {experts, other, hidden};
  if (codes.name.ends_with(kDown)) weight.shape = {experts, hidden, other};
  weight.dtype = checkpoint.model_dtype;
  weight.spec.format = *config.format;
  weight.spec.granularity = Granularity::flat;
  weight.spec.group_size = group_size;
  weight.experts4bit = true;
  weight.note = "Experts4bit";
  if (std::string reason = refuse_experts4bit(weight); !reason.empty()) return refuse(std::move(reason));
  return weight;
}

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
