#include "io/config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "core/words.h"
#include "io/json.h"
#include "io/layout.h"
#include "io/limits.h"

namespace halfbyte::io {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::array<Word<DType>, 3> kTorchNames{
    {{DType::f32, "float32"}, {DType::f16, "float16"}, {DType::bf16, "bfloat16"}}};

OrderedJson parse_config(const std::string& text) {
  OrderedJson config = parse_json<OrderedJson>(with_marked_constants(text), kConfigFile);
  HALFBYTE_CHECK(config.is_object(), bad_input, "{}: expected an object, got {}", kConfigFile,
                 config.type_name());
  return config;
}

std::string dump(const OrderedJson& config) { return without_marks(config.dump(2)) + "\n"; }
// What is written must be read again.
std::string dump_config(const OrderedJson& config) {
  std::string text = dump(config);
  config_json(text);
  return text;
}

OrderedJson bitsandbytes_entry(const ModelQuantization& q) {
  return {{"quant_method", "bitsandbytes"},
          {"load_in_4bit", true},
          {"load_in_8bit", false},
          {"bnb_4bit_quant_type", info(q.spec.format).name},
          {"bnb_4bit_use_double_quant", q.spec.double_quant},
          {"bnb_4bit_compute_dtype", torch_name(q.weight_dtype)},
          {"bnb_4bit_quant_storage", "uint8"},
          {"llm_int8_skip_modules", q.dense_modules}};
}

OrderedJson fp8_block() { return OrderedJson::array({kFp8Block, kFp8Block}); }

// Its readers refuse keys that they do not know: no more than these.
OrderedJson compressed_tensors_entry(const ModelQuantization& q) {
  const bool grouped = q.spec.granularity == Granularity::group, global = has_global_scale(q.spec);
  const FormatInfo& format = info(q.spec.format);
  const bool fp8 = q.spec.format == Format::fp8, blocks = fp8 && grouped;
  OrderedJson weights = {{"num_bits", format.bits},
                         {"type", format.scale_dtype || fp8 ? "float" : "int"},
                         {"symmetric", !q.spec.asymmetric},
                         {"strategy", global   ? "tensor_group"
                                      : blocks ? "block"
                                               : to_string(q.spec.granularity)},
                         {"group_size", grouped && !blocks ? OrderedJson(q.spec.group_size) : OrderedJson()},
                         {"dynamic", false}};
  if (blocks) weights["block_structure"] = fp8_block();
  if (format.scale_dtype)
    weights["scale_dtype"] = weights["zp_dtype"] = global ? "torch.float8_e4m3fn" : "torch.uint8";
  const OrderedJson group = {{"targets", OrderedJson::array({"Linear"})},
                             {"input_activations", nullptr},
                             {"output_activations", nullptr},
                             {"weights", weights}};
  OrderedJson entry = {{"quant_method", "compressed-tensors"},
                       {"format", compressed_tensors_format(q.spec.format)},
                       {"quantization_status", "compressed"},
                       {"ignore", q.dense_modules},
                       {"config_groups", OrderedJson::object({{"group_0", group}})}};
  if (q.decompressed) entry["run_compressed"] = false;
  return entry;
}

OrderedJson mlx_entry(const MlxGrid& grid) {
  return {{"group_size", grid.group_size}, {"bits", grid.bits}, {"mode", "affine"}};
}
OrderedJson mlx_entry(const QuantSpec& spec) { return mlx_entry({info(spec.format).bits, spec.group_size}); }
OrderedJson mlx_entry(const ModelQuantization& quantization) {
  const OrderedJson own = mlx_entry(quantization.spec);
  OrderedJson entry = own;
  auto& members = static_cast<OrderedJson::object_t::Container&>(entry.get_ref<OrderedJson::object_t&>());
  for (const auto& [module, grid] : quantization.modules) {
    if (own.contains(module))
      entry[module] = mlx_entry(grid);
    else
      members.emplace_back(module, mlx_entry(grid));  // entry[module] looks for it among all
  }
  return entry;
}

OrderedJson halfbyte_entry(const QuantSpec& spec) {
  OrderedJson entry = {{"quant_method", "halfbyte"},
                       {"version", 1},
                       {"format", info(spec.format).name},
                       {"granularity", to_string(spec.granularity)}};
  if (spec.granularity == Granularity::group || spec.granularity == Granularity::flat)
    entry["group_size"] = spec.group_size;
  return entry;
}

// Readers refuse a config without these keys. Symmetric weights are of version 1, which every reader has,
// others of version 2.
OrderedJson gptq_entry(const ModelQuantization& q) {
  OrderedJson entry = {{"quant_method", "gptq"},
                       {"bits", info(q.spec.format).bits},
                       {"group_size", q.spec.granularity == Granularity::group ? q.spec.group_size : -1},
                       {"sym", !q.spec.asymmetric},
                       {"desc_act", false},
                       {"checkpoint_format", q.spec.asymmetric ? "gptq_v2" : "gptq"},
                       {"lm_head", q.head},
                       {"pack_dtype", "int32"}};
  if (!q.blocks.empty()) entry["block_name_to_quantize"] = q.blocks;
  if (!q.quantized_modules.empty())
    entry["modules_in_block_to_quantize"] = OrderedJson::array({OrderedJson(q.quantized_modules)});
  return entry;
}

// Symmetric weights have zero points too: their readers know no others.
OrderedJson awq_entry(const ModelQuantization& q) {
  return {{"quant_method", "awq"},
          {"bits", info(q.spec.format).bits},
          {"group_size", q.spec.granularity == Granularity::group ? q.spec.group_size : -1},
          {"zero_point", true},
          {"version", "gemm"},
          {"lm_head", q.head},
          {"modules_to_not_convert", q.dense_modules}};
}

const char* modelopt_algorithm(const ModelQuantization& q) {
  return q.spec.format == Format::fp8 ? "FP8" : "NVFP4";
}

// Of hf_quant_config.json.
OrderedJson modelopt_quantization(const ModelQuantization& q) {
  OrderedJson entry = {{"quant_algo", modelopt_algorithm(q)},
                       {"kv_cache_quant_algo", nullptr},
                       {"exclude_modules", q.dense_modules}};
  if (q.spec.granularity == Granularity::group) entry["group_size"] = q.spec.group_size;
  return entry;
}
OrderedJson modelopt_entry(const ModelQuantization& q) {
  OrderedJson weights = {{"num_bits", info(q.spec.format).bits}, {"type", "float"}, {"dynamic", false}};
  if (q.spec.granularity == Granularity::group) weights["group_size"] = q.spec.group_size;
  return {{"quant_method", "modelopt"},
          {"quant_algo", modelopt_algorithm(q)},
          {"config_groups",
           OrderedJson::object(
               {{"group_0", {{"targets", OrderedJson::array({"Linear"})}, {"weights", weights}}}})},
          {"ignore", q.dense_modules}};
}

OrderedJson fp8_entry(const ModelQuantization& q) {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", fp8_block()},
          {"modules_to_not_convert", q.dense_modules}};
}

OrderedJson gpt_oss_entry(const ModelQuantization& q) {
  return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", q.dense_modules}};
}

// The "quantization_config" of a layout.
OrderedJson entry_of(const ModelQuantization& q) {
  switch (q.layout) {
    case Layout::bitsandbytes:
      return bitsandbytes_entry(q);
    case Layout::compressed_tensors:
      return compressed_tensors_entry(q);
    case Layout::mlx:
      return mlx_entry(q);
    case Layout::halfbyte:
      return halfbyte_entry(q.spec);
    case Layout::gptq:
      return gptq_entry(q);
    case Layout::awq:
      return awq_entry(q);
    case Layout::modelopt:
      return modelopt_entry(q);
    case Layout::fp8:
      return fp8_entry(q);
    case Layout::gpt_oss:
      return gpt_oss_entry(q);
  }
  HALFBYTE_FAIL(bug, "no layout {}", static_cast<int>(q.layout));
}

std::optional<WordConfig> word_config(const nlohmann::json& object) {
  if (!object.is_object()) return {};
  WordConfig config;
  bool any = false;
  const auto text_of = [&](std::initializer_list<const char*> keys) -> std::string {
    for (const char* key : keys)
      if (const auto value = object.find(key); value != object.end() && value->is_string()) {
        any = true;
        return lower_case(value->get<std::string>());
      }
    return "";
  };
  config.method = text_of({"quant_method"});
  config.format = text_of({"checkpoint_format", "packing_format", "format", "version"});
  for (const char* key : {"group_size", "q_group_size"})
    if (object.contains(key) && object[key].is_number_integer())
      config.group_size = object[key].get<int64_t>();
  if (object.contains("sym") && object["sym"].is_boolean()) config.symmetric = object["sym"].get<bool>();
  if (object.contains("zero_point") && object["zero_point"].is_boolean())
    config.symmetric = !object["zero_point"].get<bool>();
  if (object.contains("dtype") && object["dtype"].is_string())
    config.dtype = dtype_from_torch(object["dtype"].get<std::string>());
  if (!any && !object.contains("bits") && !object.contains("w_bit")) return {};
  return config;
}

// What is missing or null has the default of MLX for its affine mode.
MlxGrid mlx_grid(const nlohmann::json& object, const std::string& what) {
  const auto value = [&](const char* key, int64_t otherwise) {
    const auto member = object.find(key);
    return member == object.end() || member->is_null() ? otherwise : json_integer(object, key, what);
  };
  const int64_t bits = value("bits", 4);
  HALFBYTE_CHECK(bits >= 1 && bits <= 8, bad_input, "{}: \"bits\" must be within [1, 8], got {}", what, bits);
  const auto mode = object.find("mode");
  const bool named = mode != object.end() && mode->is_string();
  return {static_cast<int>(bits), value("group_size", 64), named ? mode->get<std::string>() : ""};
}

MlxGrids mlx_grids_of(const nlohmann::json& quantization, const std::string& what) {
  MlxGrids grids;
  if (!quantization.is_object()) return grids;
  if (quantization.contains("bits") || quantization.contains("group_size"))
    grids.all = mlx_grid(quantization, what);
  for (const auto& [module, value] : quantization.items())
    if (value.is_object()) grids.modules[module] = mlx_grid(value, what + " of module \"" + module + "\"");
  return grids;
}

}  // namespace

nlohmann::json config_json(const std::string& config) {
  HALFBYTE_CHECK(config.size() <= kMaxConfigBytes, bad_input, "{}: {} bytes, more than the limit of {}",
                 kConfigFile, config.size(), kMaxConfigBytes);
  return parse_json<nlohmann::json>(with_marked_constants(config), kConfigFile);
}

void check_config(const std::string& config) { config_json(config); }

std::string compressed_tensors_format(Format format) {
  if (format == Format::fp8) return "float-quantized";
  return info(format).scale_dtype ? fmt::format("{}-pack-quantized", info(format).name) : "pack-quantized";
}

const char* quant_method(Layout layout) { return layout == Layout::gpt_oss ? "mxfp4" : to_string(layout); }

const char* torch_name(DType dtype) { return word_of(kTorchNames, dtype); }

std::optional<DType> dtype_from_torch(std::string_view name) {
  for (const auto& word : kTorchNames)
    if (name == word.text) return word.value;
  return {};
}

std::string quant_method(const std::string& config) {
  const OrderedJson json = parse_config(config);
  for (const char* key : {"quantization_config", "quantization"}) {
    const auto entry = json.find(key);
    if (entry == json.end() || entry->is_null()) continue;
    if (entry->is_object() && entry->contains("quant_method") && (*entry)["quant_method"].is_string())
      return (*entry)["quant_method"].get<std::string>();
    return "mlx";
  }
  return "";
}

MlxGrids mlx_grids_of_config(const std::string& config) {
  const nlohmann::json json = config_json(config);
  if (!json.is_object() || !json.contains("quantization")) return {};
  return mlx_grids_of(json["quantization"], std::string(kConfigFile) + ": quantization");
}

MlxGrids mlx_grids(const std::string& quantization) {
  const std::string what = "__metadata__: quantization";
  return mlx_grids_of(parse_json<nlohmann::json>(quantization, what), what);
}

std::vector<int> compressed_tensors_bits(const std::string& config) {
  const nlohmann::json json = config_json(config);
  std::vector<int> bits;
  for (const auto& pointer : {"/quantization_config/config_groups", "/compression_config/config_groups",
                              "/text_config/quantization_config/config_groups"}) {
    const nlohmann::json::json_pointer place(pointer);
    if (!json.contains(place) || !json[place].is_object()) continue;
    for (const auto& group : json[place]) {
      const nlohmann::json::json_pointer weights("/weights/num_bits"), type("/weights/type");
      if (!group.contains(weights) || !group[weights].is_number_integer()) continue;
      if (group.contains(type) && group[type] != "int") continue;
      const auto value = group[weights].get<int64_t>();
      if (value < 1 || value > 8) continue;  // those are not packed
      bits.push_back(static_cast<int>(value));
    }
  }
  std::ranges::sort(bits);
  bits.erase(std::unique(bits.begin(), bits.end()), bits.end());
  return bits;
}

Experts4bitConfig experts4bit_config(const std::string& config) {
  const nlohmann::json json = config_json(config);
  Experts4bitConfig found;
  for (const char* part : {"", "/text_config"}) {
    const nlohmann::json::json_pointer type(fmt::format("{}/quantization_config/bnb_4bit_quant_type", part)),
        size(fmt::format("{}/hidden_size", part));
    for (const Format format : {Format::nf4, Format::fp4})
      if (!found.format && json.contains(type) && json[type] == info(format).name) found.format = format;
    if (!found.hidden_size && json.contains(size) && json[size].is_number_integer() &&
        json[size].get<int64_t>() > 0)
      found.hidden_size = json[size].get<int64_t>();
  }
  return found;
}

std::optional<WordConfig> word_config(const std::string& text, const std::string& what) {
  return word_config(parse_json<nlohmann::json>(with_marked_constants(text), what));
}

std::optional<WordConfig> word_config_of_config(const std::string& config) {
  if (config.empty()) return {};
  const nlohmann::json json = config_json(config);
  for (const char* place : {"/quantization_config", "/text_config/quantization_config"})
    if (const nlohmann::json::json_pointer pointer(place); json.contains(pointer))
      if (auto found = word_config(json[pointer])) return found;
  return {};
}

std::optional<std::array<int64_t, 2>> fp8_block_of_config(const std::string& config) {
  if (config.empty()) return {};
  const auto block_of = [](const nlohmann::json& object,
                           const char* key) -> std::optional<std::array<int64_t, 2>> {
    const auto value = object.find(key);
    if (value == object.end() || !value->is_array() || value->size() != 2) return {};
    std::array<int64_t, 2> block{};
    for (size_t i = 0; i < block.size(); ++i) {
      if (!(*value)[i].is_number_integer()) return {};
      block[i] = (*value)[i].get<int64_t>();
      if (block[i] < 1 || block[i] > kMaxFp8Block) return {};
    }
    return block;
  };
  try {
    const nlohmann::json json = config_json(config);
    for (const char* place :
         {"/quantization_config", "/compression_config", "/text_config/quantization_config"}) {
      const nlohmann::json::json_pointer pointer(place);
      if (!json.contains(pointer) || !json[pointer].is_object()) continue;
      const nlohmann::json& quantization = json[pointer];
      if (const auto block = block_of(quantization, "weight_block_size")) return block;
      const auto groups = quantization.find("config_groups");
      if (groups == quantization.end() || !groups->is_object()) continue;
      for (const auto& group : *groups)
        if (const auto weights = group.find("weights"); weights != group.end() && weights->is_object())
          if (const auto block = block_of(*weights, "block_structure")) return block;
    }
  } catch (const Error&) {
    // Whoever writes a checkpoint parses it again, and says so.
  }
  return {};
}

std::optional<DType> dtype_of_config(const std::string& config) {
  if (config.empty()) return {};
  try {
    const nlohmann::json json = config_json(config);
    for (const char* place : {"/dtype", "/torch_dtype", "/text_config/dtype", "/text_config/torch_dtype"})
      if (const nlohmann::json::json_pointer pointer(place);
          json.contains(pointer) && json[pointer].is_string())
        if (const auto dtype = dtype_from_torch(json[pointer].get<std::string>())) return dtype;
  } catch (const Error&) {
    // Whoever writes a checkpoint parses it again, and says so.
  }
  return {};
}

std::string word_quantization(const ModelQuantization& quantization, bool with_dtype) {
  OrderedJson entry = entry_of(quantization);
  if (with_dtype) entry["dtype"] = torch_name(quantization.weight_dtype);
  return with_dtype ? entry.dump() : dump(entry);
}

std::map<std::string, std::string> files_beside_config(const ModelQuantization& quantization) {
  if (quantization.layout == Layout::modelopt)
    return {{kModeloptFile, dump({{"producer", {{"name", "modelopt"}}},
                                  {"quantization", modelopt_quantization(quantization)}})}};
  if (quantization.layout != Layout::gptq) return {};
  return {{kWordFile, word_quantization(quantization, /*with_dtype=*/false)}};
}

std::string mlx_quantization(const QuantSpec& spec) { return mlx_entry(spec).dump(); }

std::string with_quantization(const std::string& config, const ModelQuantization& quantization) {
  OrderedJson json = parse_config(config);
  if (quantization.layout == Layout::mlx) json["quantization"] = mlx_entry(quantization);
  json["quantization_config"] = entry_of(quantization);
  return dump_config(json);
}

std::string without_quantization(const std::string& config, std::optional<DType> dtype) {
  OrderedJson json = parse_config(config);
  json.erase("quantization_config");
  json.erase("quantization");
  json.erase("expert_dtype");  // of DeepSeek-V4
  if (const auto text = json.find("text_config"); text != json.end() && text->is_object())
    text->erase("quantization_config");
  for (const char* key : {"dtype", "torch_dtype"})
    if (dtype && json.contains(key)) json[key] = torch_name(*dtype);
  return dump_config(json);
}

}  // namespace halfbyte::io
