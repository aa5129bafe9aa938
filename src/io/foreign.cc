#include "io/foreign.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "io/config.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

using Json = nlohmann::json;
using ForeignParameters = std::vector<std::pair<std::string, std::string>>;

constexpr std::string_view kWeight = ".weight";
constexpr const char* kUnknown = "unknown";

// ---- The tables

// A weight as a tool stores it: a tensor of codes, and beside it one of scales.
struct ForeignForm {
  const char* method;
  const char* layout;  // empty: several tools store it in this way
  const char* codes;   // the ending of its name; empty: any name
  const char* codes_dtypes;
  // Endings that take the place of `codes`; those with a dot follow the name of the module, without
  // ".weight".
  const char* scales;
  const char* scales_dtypes;   // empty: any
  const char* others;          // what else belongs to it
  int values_per_element = 0;  // codes in an element along the last axis; 0: `fits` and `describe` know
  bool (*fits)(const StoredTensor& codes, const StoredTensor& scales) = nullptr;
};

int64_t rows_of(const StoredTensor& tensor) {
  return tensor.shape.size() < 2 ? 1 : tensor.shape[tensor.shape.size() - 2];
}
int64_t cols_of(const StoredTensor& tensor) { return tensor.shape.empty() ? 1 : tensor.shape.back(); }

// Groups of 16 in codes of 4 bits.
bool is_nvfp4_of_mlx(const StoredTensor& codes, const StoredTensor& scales) {
  return cols_of(scales) < INT64_MAX / 2 && cols_of(codes) == 2 * cols_of(scales);
}
// What the layouts gptq and awq do not read. Scales are [groups, out] for both: GPTQ packs along the inputs,
// AWQ along the outputs.
bool packs_inputs(const StoredTensor& codes, const StoredTensor& scales) {
  return cols_of(codes) == cols_of(scales);
}
bool packs_outputs(const StoredTensor& codes, const StoredTensor& scales) {
  return cols_of(codes) < cols_of(scales);
}

// The first row that fits is taken.
constexpr ForeignForm kForms[] = {
    {"gptq", "gptq", ".qweight", "I32", ".scales", "F16 BF16 F32", ".qzeros .g_idx", 0, packs_inputs},
    {"awq", "awq", ".qweight", "I32", ".scales", "F16 BF16 F32", ".qzeros", 0, packs_outputs},
    {"mxfp4", "gpt-oss", "_blocks", "U8", "_scales", "U8", ""},
    {"mxfp4", "gpt-oss", ".blocks", "U8", ".scales", "U8", ""},
    {"nvfp4", "mlx", ".weight", "U32", ".scales", "U8", ".global_scale", 8, is_nvfp4_of_mlx},
    {kUnknown, "mlx", ".weight", "U32", ".scales", "U8", ""},
    {"bitnet", "bitnet", "", "U8", "_scale", "F16 BF16 F32", "", 4},
    {"fp8", "fp8", "", "F8_E4M3 F8_E5M2", "_scale_inv", "", "", 1},
    {"fp8", "", "", "F8_E4M3 F8_E5M2", "_scale", "", ".input_scale .k_scale .v_scale", 1},
    {"fp8", "", ".weight", "F8_E4M3 F8_E5M2", ".scale_weight", "", ".scale_input", 1},
    {"fp8", "fp8", ".weight", "F8_E4M3 F8_E5M2", ".scale", "", "", 1},
    {"mxfp4", "fp8", ".weight", "I8", ".scale", "F8_E8M0", "", 2},
    {"experts4bit", "bitsandbytes", ".gate_up_proj", "U8", ".gate_up_absmax", "", "", 2},
    {"experts4bit", "bitsandbytes", ".down_proj", "U8", ".down_absmax", "", "", 2},
    {"llm.int8", "bitsandbytes", ".weight", "I8", ".SCB", "F32", ".weight_format", 1},
    {"int8", "", "", "I8", "_scale", "", "_zero_point .input_scale .input_zero_point", 1},
    {"quanto", "quanto", "._data", "I8 U8 F8_E4M3 F8_E5M2", "._scale", "", "._shift"},
    {"torchao", "torchao", "_qdata", "I8 U8 I32 F8_E4M3", "_scale", "", "_zero_point _per_tensor_scale"},
    {"hqq", "hqq", ".W_q", "U8 I32", ".scale", "", ".zero"},
    {"aqlm", "aqlm", ".codes", "I8 I16 I32", ".codebooks", "", ".scales"},
    {"exl2", "exllamav2", ".q_weight", "I32", ".q_scale", "",
     ".q_scale_max .q_groups .q_group_map .q_invperm .q_perm"},
    {"exl3", "exllamav3", ".trellis", "I16", ".svh", "", ".suh .mcg .mul1"},
};

// Tensors that only quantized models have, where no row above finds what belongs to them.
constexpr std::string_view kTraces[] = {".qweight", ".SCB", ".weight_packed", ".weight_scale",
                                        ".weight_scale_inv"};

// What configs call a method: the "quant_method", and the word of quant_word below.
struct ConfigWord {
  const char* quant_method;
  const char* word;
  const char* method;  // null: a layout that is read
};
constexpr ConfigWord kConfigWords[] = {
    {"halfbyte", "", nullptr},
    {"bitsandbytes", "", nullptr},
    {"bitsandbytes", "load_in_8bit", "llm.int8"},
    {"compressed-tensors", "", nullptr},
    {"compressed-tensors", "dense", nullptr},
    {"compressed-tensors", "pack-quantized", nullptr},
    {"compressed-tensors", "float-quantized", nullptr},
    {"compressed-tensors", "int-quantized", "int8"},
    {"compressed-tensors", "nvfp4-pack-quantized", nullptr},
    {"compressed-tensors", "mxfp4-pack-quantized", nullptr},
    {"compressed-tensors", "mxfp8-quantized", nullptr},
    {"fbgemm_fp8", "", "fp8"},
    {"mxfp4", "", nullptr},
    {"mxfp8", "", nullptr},
    {"mlx", "", nullptr},
    {"mlx", "affine", nullptr},
    {"mlx", "mxfp4", nullptr},
    {"mlx", "mxfp8", nullptr},
    {"mlx", "nvfp4", nullptr},
    {"modelopt", "", nullptr},
    {"modelopt", "FP8", nullptr},
    {"modelopt", "FP8_PB_WO", "fp8"},
    {"modelopt", "MXFP8", nullptr},
    {"modelopt", "NVFP4", nullptr},
    {"modelopt", "MIXED_PRECISION", nullptr},  // its layers say
};

// What is shown of a config, in this order.
constexpr const char* kParameters[] = {"bits",
                                       "nbits",
                                       "w_bit",
                                       "num_bits",
                                       "type",
                                       "strategy",
                                       "group_size",
                                       "q_group_size",
                                       "weight_block_size",
                                       "block_structure",
                                       "sym",
                                       "symmetric",
                                       "zero_point",
                                       "desc_act",
                                       "actorder",
                                       "checkpoint_format",
                                       "packing_format",
                                       "version",
                                       "fmt",
                                       "mode",
                                       "weights",
                                       "quant_type",
                                       "quant_algo",
                                       "kv_cache_quant_algo",
                                       "activation_scheme",
                                       "activations",
                                       "llm_int8_threshold"};

// Files that describe a quantization, where in them, and the "quant_method" of one that does not say.
struct ConfigPlace {
  const char* file;
  std::vector<const char*> keys;
  const char* quant_method;
  bool decides = true;  // false: left over from another model, where no tensor is of this method
};
const std::vector<ConfigPlace>& config_places() {
  static const auto& places = *new std::vector<ConfigPlace>{
      {"config.json", {"quantization_config"}, "mlx"},
      {"config.json", {"compression_config"}, "compressed-tensors"},
      {"config.json", {"text_config", "quantization_config"}, "mlx"},
      {"config.json", {"quantization"}, "mlx"},
      {"hf_quant_config.json", {"quantization"}, "modelopt"},
      {"quantize_config.json", {}, "gptq", false},
      {"quant_config.json", {}, "awq", false},
  };
  return places;
}

// How to make a dense model of it.
struct Advice {
  const char* method;
  const char* layout;  // empty: of any
  const char* text;
};
constexpr const char* kDequantizer =
    "make it dense with convert_checkpoint of compressed-tensors and its CompressedTensorsDequantizer";
constexpr Advice kAdvice[] = {
    {"", "compressed-tensors", kDequantizer},
    {"", "mlx", "make it dense with mlx_lm.convert --dequantize"},
    {"mxfp4", "gpt-oss", "load it in transformers with Mxfp4Config(dequantize=True), and save that"},
    {"llm.int8", "", "load it in transformers, call dequantize() of the model, and save that"},
    {"fp8", "fp8",
     "make it dense with convert_checkpoint of compressed-tensors and its FP8BlockDequantizer, or load it in "
     "transformers with FineGrainedFP8Config(dequantize=True) and save that"},
};
constexpr const char* kGeneralAdvice =
    "take the dense model that it was made from, or make it dense with the tool that made it";

// ---- Tensors

// Whether a list of words, separated by spaces, has the word. An empty list has all.
bool has_word(std::string_view list, std::string_view word) {
  if (list.empty()) return true;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(' ', begin), list.size());
    if (list.substr(begin, end - begin) == word) return true;
    begin = end + 1;
  }
  return false;
}

void add_parameter(ForeignParameters& parameters, const std::string& key, const Json& value) {
  parameters.emplace_back(key, value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace));
}
bool has_parameter(const ForeignParameters& parameters, std::string_view key) {
  return std::ranges::find(parameters, key, &ForeignParameters::value_type::first) != parameters.end();
}

// The smallest power of two of which `count` cover `extent`.
int64_t block_extent(int64_t extent, int64_t count) {
  int64_t block = 1;
  while (count > 0 && block < INT64_MAX / 2 && (extent - 1) / block + 1 > count) block *= 2;
  return block;
}

// What shares a scale, of a matrix of so many rows and columns.
void describe_scales(int64_t rows, int64_t cols, const StoredTensor& scales, ForeignParameters& parameters) {
  const int64_t scale_rows = rows_of(scales), scale_cols = cols_of(scales);
  if (std::ranges::all_of(scales.shape, [](int64_t extent) { return extent == 1; }))
    return add_parameter(parameters, "granularity", "tensor");
  if ((scales.shape.size() == 1 && scale_cols == rows) || (scale_rows == rows && scale_cols == 1))
    return add_parameter(parameters, "granularity", "channel");
  if (scale_rows == rows && scale_cols > 0 && cols % scale_cols == 0)
    return add_parameter(parameters, "group_size", cols / scale_cols);
  if (scales.shape.size() >= 2)
    add_parameter(parameters, "weight_block_size",
                  {block_extent(rows, scale_rows), block_extent(cols, scale_cols)});
}

// The geometry of a weight, which its shapes tell.
void describe(const Checkpoint::Impl& checkpoint, const ForeignForm& form, const std::string& module,
              const StoredTensor& codes, const StoredTensor& scales, ForeignParameters& parameters) {
  const int64_t rows = rows_of(codes), cols = cols_of(codes);
  if (form.values_per_element > 0) {
    if (cols < INT64_MAX / form.values_per_element)
      describe_scales(rows, cols * form.values_per_element, scales, parameters);
  } else if (form.layout == std::string_view("gpt-oss")) {
    if (cols < INT64_MAX / 2) add_parameter(parameters, "group_size", 2 * cols);
  } else if (const StoredTensor* zeros = checkpoint.find(module + ".qzeros")) {
    // Zero points are packed like codes: [groups, out * bits / 32] for [groups, out] scales.
    const int64_t out = cols_of(scales), groups = rows_of(scales), words = cols_of(*zeros);
    if (out <= 0 || groups <= 0 || words >= INT64_MAX / 32 || rows >= INT64_MAX / 32) return;
    const int64_t bits = 32 * words / out;
    if (bits < 1 || bits > 8) return;
    add_parameter(parameters, "bits", bits);
    const int64_t inputs = form.method == std::string_view("gptq") ? 32 * rows / bits : rows;
    add_parameter(parameters, "group_size", inputs / groups);
  }
}

// A matrix of small floats is no weight as it was trained.
bool is_low_bit_matrix(const StoredTensor& tensor) {
  return tensor.shape.size() >= 2 && tensor.dtype.starts_with('F') &&
         safetensors_dtype_bits(tensor.dtype) <= 8 &&
         (tensor.name.ends_with(kWeight) || tensor.name.find("experts") != std::string::npos);
}

// What the configs say of a method, each parameter with the values of all parts of the model. No more methods
// and values than these are kept: what a config can have is looked through for each.
constexpr size_t kMaxSaid = 64;
struct Said {
  ForeignQuantization quantization;
  bool decides = false;
  std::vector<std::vector<Json>> values = std::vector<std::vector<Json>>(std::size(kParameters));
};

class Finder {
 public:
  explicit Finder(Checkpoint::Impl& checkpoint)
      : checkpoint_(checkpoint), weight_of_(checkpoint.tensors.size(), nullptr) {
    for (Weight& weight : checkpoint.weights)
      if (!weight.layout) weight_of_[static_cast<size_t>(weight.parts.front())] = &weight;
  }

  void find();

 private:
  // The dense weight that is this tensor; null for one of a known layout.
  Weight* weight_of(const StoredTensor& tensor) const {
    return weight_of_[static_cast<size_t>(&tensor - checkpoint_.tensors.data())];
  }
  bool mark(const std::string& name, const char* method);
  ForeignQuantization& entry(const std::string& method, const std::string& layout);
  bool match(const StoredTensor& tensor, const ForeignForm& form);
  void find_traces();
  void find_configs();
  void read_config(const Json& config, const ConfigPlace& place);
  void add_config(const Json& object, const std::string& quant_method, const std::string& word,
                  const ConfigPlace& place);
  void merge(Said& said);

  Checkpoint::Impl& checkpoint_;
  std::vector<Weight*> weight_of_;
  std::vector<ForeignQuantization> found_;  // in the order of finding
  std::vector<Said> said_;
};

ForeignQuantization& Finder::entry(const std::string& method, const std::string& layout) {
  for (ForeignQuantization& known : found_)
    if (known.method == method && known.layout == layout) return known;
  return found_.emplace_back(ForeignQuantization{method, layout, "", {}, 0, "", ""});
}

bool Finder::mark(const std::string& name, const char* method) {
  const StoredTensor* tensor = checkpoint_.find(name);
  Weight* weight = tensor == nullptr ? nullptr : weight_of(*tensor);
  if (weight != nullptr) weight->foreign = method;
  return weight != nullptr;
}

bool Finder::match(const StoredTensor& tensor, const ForeignForm& form) {
  const std::string_view ending = form.codes;
  if (!tensor.name.ends_with(ending) || !has_word(form.codes_dtypes, tensor.dtype)) return false;
  const std::string stem = tensor.name.substr(0, tensor.name.size() - ending.size());
  const std::string module = stem.ends_with(kWeight) ? stem.substr(0, stem.size() - kWeight.size()) : stem;
  const auto beside = [&](std::string_view other) {
    return (other.starts_with('.') ? module : stem) + std::string(other);
  };
  const StoredTensor* scales = checkpoint_.find(beside(form.scales));
  if (scales == nullptr || weight_of(*scales) == nullptr || !has_word(form.scales_dtypes, scales->dtype))
    return false;
  if (form.fits != nullptr && !form.fits(tensor, *scales)) return false;

  ForeignQuantization& found = entry(form.method, form.layout);
  if (found.num_weights++ == 0) {
    found.example = tensor.name;
    if (const auto reason = checkpoint_.not_read.find(tensor.name); reason != checkpoint_.not_read.end())
      found.advice = reason->second;
    describe(checkpoint_, form, module, tensor, *scales, found.parameters);
  }
  weight_of(tensor)->foreign = weight_of(*scales)->foreign = form.method;
  for (std::string_view rest = form.others; !rest.empty();) {
    const size_t end = std::min(rest.find(' '), rest.size());
    mark(beside(rest.substr(0, end)), form.method);
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return true;
}

void Finder::find_traces() {
  for (const StoredTensor& tensor : checkpoint_.tensors) {
    Weight* weight = weight_of(tensor);
    if (weight == nullptr || !weight->foreign.empty()) continue;
    const bool small = is_low_bit_matrix(tensor);
    if (!small && !std::ranges::any_of(kTraces, [&](auto trace) { return tensor.name.ends_with(trace); }))
      continue;
    const bool fp8 = small && safetensors_dtype_bits(tensor.dtype) == 8;
    ForeignQuantization& found = entry(fp8 ? "fp8" : kUnknown, "");
    if (found.num_weights++ == 0) {
      found.example = tensor.name;
      add_parameter(found.parameters, "dtype", tensor.dtype);
    }
    weight->foreign = found.method;
  }
}

// ---- Configs

// The word that tells the methods of one "quant_method" apart.
std::string quant_word(const Json& object, const std::string& quant_method) {
  const auto text = [&](const char* key) {
    return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : "";
  };
  if (quant_method == "compressed-tensors") return text("format");
  if (quant_method == "modelopt") return text("quant_algo");
  if (quant_method == "mlx") return text("mode");
  if (quant_method == "bitsandbytes" && object.contains("load_in_8bit") && object["load_in_8bit"] == true)
    return "load_in_8bit";
  return "";
}

void Finder::add_config(const Json& object, const std::string& quant_method, const std::string& word,
                        const ConfigPlace& place) {
  std::string method = word.empty() ? quant_method : word;
  for (const ConfigWord& row : kConfigWords)
    if (row.quant_method == quant_method && row.word == word) {
      if (row.method == nullptr) return;
      method = row.method;
    }
  const auto same = [&](const Said& known) {
    return known.quantization.method == method && known.quantization.layout == quant_method;
  };
  auto said = std::ranges::find_if(said_, same);
  if (said == said_.end()) {
    if (said_.size() == kMaxSaid) return;
    said_.push_back({{method, quant_method, place.file, {}, 0, "", ""}});
    said = said_.end() - 1;
  }
  said->decides |= place.decides;
  for (size_t i = 0; i < std::size(kParameters); ++i) {
    const auto value = object.find(kParameters[i]);
    if (value == object.end() || value->is_null() || value->is_object()) continue;
    std::vector<Json>& values = said->values[i];
    if (values.size() < kMaxSaid && std::ranges::find(values, *value) == values.end())
      values.push_back(*value);
  }
}

// "int8 token dynamic"
Json activations_of(const Json& group) {
  const auto activations = group.find("input_activations");
  if (activations == group.end() || !activations->is_object()) return nullptr;
  std::string text;
  for (const char* key : {"type", "num_bits", "strategy", "dynamic"}) {
    const auto value = activations->find(key);
    if (value == activations->end()) continue;
    if (value->is_string())
      text += (text.empty() ? "" : " ") + value->get<std::string>();
    else if (value->is_number_integer())
      text += value->dump();
    else if (*value == true)
      text += " dynamic";
  }
  return text;
}

void Finder::read_config(const Json& config, const ConfigPlace& place) {
  const Json* object = &config;
  for (const char* key : place.keys) {
    if (!object->is_object() || !object->contains(key)) return;
    object = &(*object)[key];
  }
  if (!object->is_object()) return;
  std::string quant_method = place.quant_method;
  if (object->contains("quant_method") && (*object)["quant_method"].is_string())
    quant_method = (*object)["quant_method"].get<std::string>();
  const std::string word = quant_word(*object, quant_method);

  // Those of parts of the model, where it has any.
  const auto member = [&](const char* key) -> const Json* {
    const auto found = object->find(key);
    return found != object->end() && found->is_object() ? &*found : nullptr;
  };
  if (const Json* groups = member("config_groups"); groups != nullptr && !groups->empty()) {
    for (const Json& group : *groups) {
      if (!group.is_object()) continue;
      const std::string own = quant_word(group, quant_method);
      Json weights =
          group.contains("weights") && group["weights"].is_object() ? group["weights"] : Json::object();
      weights["activations"] = activations_of(group);
      add_config(weights, quant_method, own.empty() ? word : own, place);
    }
    return;
  }
  add_config(*object, quant_method, word, place);
  const Json* parts = quant_method == "mlx" ? object : member("quantized_layers");
  if (parts == nullptr) return;
  for (const Json& part : *parts)
    if (part.is_object()) add_config(part, quant_method, quant_word(part, quant_method), place);
}

void Finder::find_configs() {
  std::map<std::string, Json> documents;  // of the files; null: it cannot be understood
  for (const ConfigPlace& place : config_places()) {
    const std::string& text = checkpoint_.config_text(place.file);
    if (text.empty()) continue;
    const auto [document, added] = documents.emplace(place.file, nullptr);
    if (added) try {
        document->second = parse_json<Json>(with_marked_constants(text), place.file);
      } catch (const Error&) {
        // The tensors can be shown without it. Whoever writes a checkpoint parses it again, and says so.
      }
    read_config(document->second, place);
  }
}

const char* advice_for(const ForeignQuantization& quantization) {
  for (const Advice& row : kAdvice)
    if ((*row.method == '\0' || row.method == quantization.method) &&
        (*row.layout == '\0' || row.layout == quantization.layout))
      return row.text;
  return kGeneralAdvice;
}

// Adds it to what was found of the method. What no tensor shows counts where the tensors are not understood:
// not beside weights of known layouts only.
void Finder::merge(Said& said) {
  ForeignQuantization& quantization = said.quantization;
  for (size_t i = 0; i < std::size(kParameters); ++i)
    if (!said.values[i].empty())
      add_parameter(quantization.parameters, kParameters[i],
                    said.values[i].size() == 1 ? said.values[i].front() : Json(said.values[i]));
  auto found = std::ranges::find(found_, quantization.method, &ForeignQuantization::method);
  if (found != found_.end() && !found->source.empty()) return;  // another file has said it
  const bool is_read = std::ranges::any_of(checkpoint_.quantized, [&](const StoredWeight& stored) {
    return to_string(stored.weight.layout) == quantization.method;
  });
  if (found == found_.end() && is_read) return;
  // A tool with a word of its own for what is stored like another's: "auto-round" for GPTQ.
  if (found == found_.end() && said.decides && found_.size() == 1 && found_.front().source.empty()) {
    found = found_.begin();
    found->layout = quantization.layout;
    if (found->method == kUnknown) {
      for (Weight& weight : checkpoint_.weights)
        if (!weight.foreign.empty()) weight.foreign = quantization.method;
      found->method = quantization.method;
    }
  }
  if (found == found_.end()) {
    if (said.decides && (checkpoint_.quantized.empty() || !found_.empty())) found_.push_back(quantization);
    return;
  }
  // A config may describe what shares a scale in another way than the tensors.
  const bool has_groups = has_parameter(quantization.parameters, "strategy") ||
                          has_parameter(quantization.parameters, "group_size") ||
                          has_parameter(quantization.parameters, "q_group_size") ||
                          has_parameter(quantization.parameters, "weight_block_size");
  for (const auto& [key, value] : found->parameters)
    if (key == "bits"
            ? !has_parameter(quantization.parameters, "w_bit") && !has_parameter(quantization.parameters, key)
            : !has_groups)
      quantization.parameters.emplace_back(key, value);
  found->parameters = std::move(quantization.parameters);
  found->source = quantization.source;
  if (found->layout.empty()) found->layout = quantization.layout;
}

void Finder::find() {
  for (const StoredTensor& tensor : checkpoint_.tensors) {
    const Weight* weight = weight_of(tensor);
    if (weight == nullptr || !weight->foreign.empty()) continue;
    for (const ForeignForm& form : kForms)
      if (match(tensor, form)) break;
  }
  find_traces();
  find_configs();
  const auto is_found = [&](const Said& said) {
    return std::ranges::find(found_, said.quantization.method, &ForeignQuantization::method) != found_.end();
  };
  std::stable_partition(said_.begin(), said_.end(), is_found);
  for (Said& said : said_) merge(said);
  for (ForeignQuantization& found : found_) {
    if (found.source.empty()) found.source = "tensors";
    if (found.advice.empty()) found.advice = advice_for(found);
  }
  checkpoint_.foreign = std::move(found_);
}

}  // namespace

void find_foreign(Checkpoint::Impl& checkpoint) { Finder(checkpoint).find(); }

void refuse_foreign(const Checkpoint::Impl& checkpoint) {
  if (checkpoint.foreign.empty()) return;
  const ForeignQuantization& first = checkpoint.foreign.front();
  std::string text = printable(first.method);
  if (!first.layout.empty() && first.layout != first.method)
    text += fmt::format(" of {}", printable(first.layout));
  for (const auto& [key, value] : first.parameters) {
    const Json json = Json::parse(value);
    text += fmt::format(", {} {}", key, printable(json.is_string() ? json.get<std::string>() : value));
  }
  const std::string weights =
      first.num_weights == 0
          ? ""
          : fmt::format(": {} weights, the first is \"{}\"", first.num_weights, printable(first.example));
  HALFBYTE_FAIL(bad_input, "\"{}\" is already quantized ({}; from {}){}, and halfbyte does not read that: {}",
                printable(checkpoint.path), text, first.source, weights, first.advice);
}

}  // namespace halfbyte::io
