// The rules that readers of quantized checkpoints rely on.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/format.h"
#include "halfbyte/verify.hpp"
#include "io/checkpoint.h"
#include "io/config.h"
#include "io/fused.h"
#include "io/progress.h"
#include "io/safetensors.h"
#include "io/shard_index.h"

namespace halfbyte {
namespace io {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kWeightSuffix = ".weight";

// How the tensors of block floats are called, after the name of the weight, and what they must be.
struct BlockForm {
  Layout layout;
  const char* codes;
  const char* scales;
  const char* global;
  int global_rank;
};
constexpr BlockForm kBlockForms[] = {
    {Layout::compressed_tensors, "_packed", "_scale", "_global_scale", 1},
    {Layout::modelopt, "", "_scale", "_scale_2", 0},
};

bool is_usable(float scale) { return scale > 0 && std::isfinite(scale); }

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// "model.layers.7.mlp.experts.3.up_proj" -> "model.layers.", 7, ".mlp.experts.3.up_proj" for list ".layers.".
struct InList {
  std::string before;
  int64_t number = -1;
  std::string after;
};
std::optional<InList> in_list(const std::string& name, std::string_view list) {
  const size_t at = name.find(list);
  if (at == std::string::npos) return std::nullopt;
  const size_t begin = at + list.size(), end = std::min(name.find('.', begin), name.size());
  InList result{name.substr(0, begin), -1, name.substr(end)};
  const auto [rest, error] = std::from_chars(name.data() + begin, name.data() + end, result.number);
  if (error != std::errc() || rest != name.data() + end || result.number < 0) return std::nullopt;
  return result;
}

class Verifier {
 public:
  Verifier(const std::string& path, const ProgressFunction& progress)
      : path_(path), progress_(progress), reporter_(progress) {}

  std::vector<Fault> run() {
    if (open()) {
      check_parts();
      check_lists();
      if (faults_.empty() && complete()) {
        check_values();
        check_global_scales();
        check_dense();
        check_config();
      }
    }
    std::ranges::sort(faults_, [](const Fault& a, const Fault& b) {
      return std::tie(a.rule, a.name) < std::tie(b.rule, b.name);
    });
    return std::move(faults_);
  }

 private:
  // Names come from files.
  template <class Value>
  static auto shown(const Value& value) {
    if constexpr (std::is_convertible_v<Value, std::string_view>)
      return printable(value);
    else
      return value;
  }
  template <class... Values>
  void fault(const char* rule, const std::string& name,
             fmt::format_string<decltype(shown(std::declval<Values>()))...> text, const Values&... values) {
    faults_.push_back({rule, name, fmt::format(text, shown(values)...)});
  }

  // Files, headers and the index; false where there is nothing to look at.
  bool open() {
    try {
      checkpoint_ = open_tensors(path_, stop_of(progress_));
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::bad_input) throw;
      const std::string_view text = error.what();
      faults_.push_back(
          {text.find(kIndexFile) == std::string_view::npos ? "file" : "index", path_, std::string(text)});
      return false;
    }
  }
  // The weights; all that is found until then are faults that keep weights from being read.
  bool complete() {
    try {
      checkpoint_ = open_checkpoint(path_, stop_of(progress_));
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::bad_input) throw;
      faults_.push_back({"weight", path_, error.what()});
      return false;
    }
  }

  // ---- What tensors there are

  void check_parts() {
    for (const StoredTensor& tensor : checkpoint_->tensors)
      for (const BlockForm& form : kBlockForms) {
        if (is_codes(tensor, form)) check_block(tensor, form);
        check_orphan(tensor, form);
      }
    for (const StoredTensor& tensor : checkpoint_->tensors) {
      if (is_fp8(tensor)) check_fp8(tensor);
      check_mxfp4(tensor);
      if (is_of_experts(tensor, "_blocks")) check_experts(tensor);
      check_orphan(tensor, "_scale_inv", "");
      if (tensor.dtype == "F8_E8M0") check_orphan(tensor, ".scale", kWeightSuffix);
      if (is_of_experts(tensor, "_scales")) check_orphan(tensor, "_scales", "_blocks");
      check_experts4bit(tensor);
    }
  }

  // ---- Experts of bitsandbytes as Experts4bit

  void check_experts4bit(const StoredTensor& tensor) {
    const std::string scales = experts4bit_scales(tensor.name);
    const bool own_state = checkpoint_->find(tensor.name + ".absmax") != nullptr;  // a quant_state beside it
    if (is_of_experts(tensor, "_proj") && !scales.empty() && tensor.shape.size() == 2 && !own_state) {
      const StoredTensor* scale = checkpoint_->find(scales);
      std::string why_not;
      if (scale == nullptr)
        fault("scale-missing", tensor.name, "there is no \"{}\"", scales);
      else if (!experts4bit_weight(*checkpoint_, tensor, *scale, why_not))
        fault("experts4bit", tensor.name, "{}", why_not);
    }
    constexpr std::string_view kAbsmax = "_absmax";
    if (tensor.name.find(".experts.") == std::string::npos || !tensor.name.ends_with(kAbsmax)) return;
    const std::string codes = weight_of(tensor, kAbsmax) + "_proj";
    if (experts4bit_scales(codes) == tensor.name) check_orphan(tensor, kAbsmax, "_proj");
  }

  // ---- fp8

  static bool is_fp8(const StoredTensor& tensor) {
    return (tensor.dtype == "F8_E4M3" || tensor.dtype == "F8_E5M2") && tensor.shape.size() >= 2 &&
           !tensor.name.ends_with("_scale") && !tensor.name.ends_with("scales");
  }

  void check_fp8(const StoredTensor& codes) {
    const StoredTensor* inverse = checkpoint_->find(codes.name + "_scale_inv");
    const StoredTensor* of_others = checkpoint_->find(codes.name + "_scale");
    const StoredTensor* of_module = checkpoint_->find(module_of(codes.name) + ".scale");
    const StoredTensor* scale = inverse != nullptr ? inverse : of_others != nullptr ? of_others : of_module;
    if (scale == nullptr)
      return fault("scale-missing", codes.name, "there is no \"{}_scale_inv\" and no \"{}_scale\"",
                   codes.name, codes.name);
    const Layout layout = scale->shape.empty() ? Layout::modelopt : Layout::fp8;
    const auto weight = scale == of_others ? fp8_weight(*checkpoint_, layout, codes.name, codes, *scale)
                                           : fp8_layout_weight(*checkpoint_, codes, *scale);
    if (weight) return;
    const auto dtype = dtype_from_safetensors(scale->dtype);
    if (scale->dtype != "F8_E8M0" && (!dtype || !is_floating(*dtype) || *dtype == DType::f64))
      return fault("scale-dtype", codes.name, "\"{}\" is {} {}", scale->name, scale->dtype,
                   shape_text(scale->shape));
    std::vector<int64_t> blocks = codes.shape;
    const auto block = checkpoint_->fp8_block.value_or(std::array{kFp8Block, kFp8Block});
    for (size_t axis = 0; axis < block.size(); ++axis) {
      int64_t& extent = blocks[blocks.size() - block.size() + axis];
      extent = ceil_div(extent, block[axis]);
    }
    fault("scale-shape", codes.name, "\"{}\" is {}, but blocks of codes {} have scales {}", scale->name,
          shape_text(scale->shape), shape_text(codes.shape), shape_text(blocks));
  }

  // Experts of DeepSeek-V4.
  void check_mxfp4(const StoredTensor& codes) {
    if (codes.dtype != "I8" || !codes.name.ends_with(kWeightSuffix)) return;
    const StoredTensor* scale = checkpoint_->find(module_of(codes.name) + ".scale");
    if (scale != nullptr && scale->dtype == "F8_E8M0" && !fp8_layout_weight(*checkpoint_, codes, *scale))
      fault("scale-shape", codes.name, "\"{}\" is {}, but codes {} have a scale for each 16 bytes of a row",
            scale->name, shape_text(scale->shape), shape_text(codes.shape));
  }

  // ---- Experts of gpt-oss

  static bool is_of_experts(const StoredTensor& tensor, std::string_view ending) {
    return tensor.dtype == "U8" && tensor.name.ends_with(ending) &&
           tensor.name.find(".experts.") != std::string::npos;
  }

  void check_experts(const StoredTensor& codes) {
    const std::string weight = weight_of(codes, "_blocks");
    const StoredTensor* scale = checkpoint_->find(weight + "_scales");
    if (scale == nullptr) return fault("scale-missing", weight, "there is no \"{}_scales\"", weight);
    if (scale->dtype != "U8") return fault("scale-dtype", weight, "\"{}\" is {}", scale->name, scale->dtype);
    if (codes.shape.size() != 4 || codes.shape.back() != 16)
      return fault("codes-shape", weight, "\"{}\" {} is not [experts, rows, groups, 16]", codes.name,
                   shape_text(codes.shape));
    const std::vector<int64_t> expected(codes.shape.begin(), codes.shape.end() - 1);
    if (scale->shape != expected)
      fault("scale-shape", weight, "\"{}\" is {}, but codes {} have scales {}", scale->name,
            shape_text(scale->shape), shape_text(codes.shape), shape_text(expected));
  }

  void check_orphan(const StoredTensor& tensor, std::string_view ending, std::string_view codes) {
    if (!tensor.name.ends_with(ending)) return;
    const std::string weight = weight_of(tensor, ending);
    if (checkpoint_->find(weight + std::string(codes)) == nullptr)
      fault("codes-missing", weight, "there is \"{}\", and no \"{}{}\"", tensor.name, weight, codes);
  }

  // ---- Block floats

  std::string weight_of(const StoredTensor& tensor, std::string_view ending) const {
    return tensor.name.substr(0, tensor.name.size() - ending.size());
  }

  bool is_codes(const StoredTensor& tensor, const BlockForm& form) const {
    if (tensor.dtype != "U8" || !tensor.name.ends_with(form.codes)) return false;
    if (form.layout == Layout::compressed_tensors) return true;
    const StoredTensor* scale = checkpoint_->find(tensor.name + form.scales);
    return (scale != nullptr && scale->dtype == "F8_E4M3") ||
           checkpoint_->find(tensor.name + form.global) != nullptr;
  }

  void check_block(const StoredTensor& codes, const BlockForm& form) {
    const std::string weight = weight_of(codes, form.codes);
    const StoredTensor* scale = checkpoint_->find(weight + form.scales);
    const StoredTensor* global = checkpoint_->find(weight + form.global);
    if (scale == nullptr) return fault("scale-missing", weight, "there is no \"{}{}\"", weight, form.scales);
    const bool nvfp4 = scale->dtype == "F8_E4M3" || form.layout == Layout::modelopt;
    if (scale->dtype != "F8_E4M3" && (nvfp4 || scale->dtype != "U8"))
      return fault("scale-dtype", weight, "\"{}\" is {}", scale->name, scale->dtype);
    if (nvfp4 && global == nullptr)
      fault("global-scale-missing", weight, "there is no \"{}{}\"", weight, form.global);
    if (global != nullptr && (global->dtype != "F32" || global->num_bytes != sizeof(float)))
      fault("global-scale-shape", weight, "\"{}\" is {} {}, not one F32", global->name, global->dtype,
            shape_text(global->shape));
    const int64_t group = info(nvfp4 ? Format::nvfp4 : Format::mxfp4).group_size;
    if (codes.shape.size() < 2 || codes.shape.back() % (group / 2) != 0)
      return fault("codes-shape", weight, "\"{}\" {} has no rows of groups of {}", codes.name,
                   shape_text(codes.shape), group);
    const std::vector<int64_t> expected = with_last(codes.shape, codes.shape.back() / (group / 2));
    if (scale->shape != expected)
      fault("scale-shape", weight, "\"{}\" is {}, but codes {} have scales {}", scale->name,
            shape_text(scale->shape), shape_text(codes.shape), shape_text(expected));
  }

  // Scales of codes that are not there.
  void check_orphan(const StoredTensor& tensor, const BlockForm& form) {
    if (!tensor.name.ends_with(form.global)) return;
    const std::string weight = weight_of(tensor, form.global);
    if (!weight.ends_with(kWeightSuffix)) return;
    const StoredTensor* codes = checkpoint_->find(weight + form.codes);
    if (codes == nullptr)
      fault("codes-missing", weight, "there is \"{}\", and no \"{}{}\"", tensor.name, weight, form.codes);
    else if (codes->dtype != "U8")
      fault("codes-dtype", weight, "\"{}\" is {}, not U8", codes->name, codes->dtype);
  }

  Json config() const {
    return checkpoint_->config.empty() ? Json::object() : config_json(checkpoint_->config);
  }
  static const Json* member(const Json& object, std::initializer_list<const char*> keys) {
    for (const Json* place : {&object, object.contains("text_config") ? &object["text_config"] : nullptr})
      for (const char* key : keys)
        if (place != nullptr && place->is_object() && place->contains(key)) return &(*place)[key];
    return nullptr;
  }
  static std::optional<int64_t> number(const Json& object, std::initializer_list<const char*> keys) {
    const Json* value = member(object, keys);
    if (value == nullptr || !value->is_number_integer()) return std::nullopt;
    return value->get<int64_t>();
  }

  // Layers and experts are numbered from 0 without gaps, as many as the config says, and experts of a layer
  // have the same tensors.
  void check_lists() {
    const Json json = config();
    if (const auto layers = number(json, {"num_hidden_layers", "n_layer"}))
      check_list(".layers.", "layers-incomplete", layers, false);
    check_list(".experts.", "experts-incomplete",
               number(json, {"num_local_experts", "num_experts", "n_routed_experts"}), true);
  }
  void check_list(std::string_view list, const char* rule, std::optional<int64_t> count, bool alike) {
    std::map<std::string, std::map<int64_t, std::set<std::string>>> lists;
    for (const StoredTensor& tensor : checkpoint_->tensors)
      if (auto found = in_list(tensor.name, list))
        lists[found->before][found->number].insert(std::move(found->after));
    for (const auto& [before, members] : lists) {
      const int64_t last = std::min<int64_t>(members.rbegin()->first, INT32_MAX);
      const int64_t wanted = std::max(count.value_or(0), last + 1);
      std::set<std::string> all;
      for (const auto& [index, parts] : members) all.insert(parts.begin(), parts.end());
      for (int64_t i = 0; i < wanted && std::ssize(faults_) < kMostFaults; ++i) {
        const auto found = members.find(i);
        if (found == members.end())
          fault(rule, fmt::format("{}{}", before, i), "of {} there is nothing", wanted);
        else if (alike)
          for (const std::string& part : all)
            if (!found->second.contains(part) && std::ssize(faults_) < kMostFaults)
              fault(rule, fmt::format("{}{}", before, i), "there is no \"{}{}{}\", which others have", before,
                    i, part);
      }
      if (count && members.rbegin()->first >= *count)
        fault(rule, fmt::format("{}{}", before, members.rbegin()->first),
              "config.json says that there are {}", *count);
    }
  }

  // ---- What they hold

  void check_values() {
    for (const StoredWeight& stored : checkpoint_->quantized) {
      const QuantizedWeight& weight = stored.weight;
      check_scales(stored);
      if (weight.spec.format == Format::fp8) check_codes(stored);
      if (has_global_scale(weight.spec) && !is_usable(weight.global_scale))
        fault("global-scale-invalid", weight.name, "the global scale is {}", weight.global_scale);
      for (const std::string& name : weight.others) {
        const StoredTensor& tensor = *checkpoint_->find(name);
        if (tensor.dtype != "F32" || tensor.num_bytes != sizeof(float)) continue;
        const float value = read_f32(*checkpoint_, name, "verify");
        if (!is_usable(value)) fault("activation-scale-invalid", weight.name, "\"{}\" is {}", name, value);
      }
    }
  }

  // Calls body(bytes, their offset) for all of a tensor.
  template <class Body>
  void for_each_part(const StoredTensor& tensor, const Body& body) {
    constexpr uint64_t kPart = uint64_t{1} << 20;
    std::vector<std::byte> buffer(std::min(kPart, tensor.num_bytes));
    for (uint64_t offset = 0; offset < tensor.num_bytes; offset += buffer.size()) {
      const std::span<std::byte> bytes(buffer.data(),
                                       std::min<uint64_t>(buffer.size(), tensor.num_bytes - offset));
      checkpoint_->read(tensor, offset, bytes);
      body(bytes, offset);
      reporter_.poll();
    }
  }

  void check_codes(const StoredWeight& stored) {
    const StoredTensor& tensor = stored.part(Role::codes);
    // The least code, without its sign, that is no number; of E5M2 those of infinity too.
    const int least = stored.weight.e5m2_codes ? 0x7C : 0x7F;
    uint64_t num_nan = 0, first = 0;
    for_each_part(tensor, [&](std::span<const std::byte> bytes, uint64_t offset) {
      for (size_t i = 0; i < bytes.size(); ++i)
        if (std::to_integer<int>(bytes[i] & std::byte{0x7F}) >= least && num_nan++ == 0) first = offset + i;
    });
    if (num_nan > 0)
      fault("code-nan", stored.weight.name, "{} of {} codes in \"{}\" are NaN or infinite, the first at {}",
            num_nan, tensor.num_bytes, tensor.name, first);
  }

  void check_scales(const StoredWeight& stored) {
    const QuantizedWeight& weight = stored.weight;
    if (weight.spec.double_quant) return;  // of other values
    const StoredTensor& tensor = stored.part(Role::scales);
    const auto type = scale_type(weight.exponents.empty() ? weight.spec.scale_dtype : DType::f8_e8m0);
    const int64_t size = formats::scale_bytes(type);
    const bool own = info(weight.spec.format).scale_dtype.has_value(),
               positive = own || weight.spec.format == Format::fp8,
               fills = own && weight.layout != Layout::mlx;  // which writes 0 for groups of zeros
    int64_t num_nan = 0, num_zero = 0, num_negative = 0, first = -1;
    for_each_part(tensor, [&](std::span<const std::byte> bytes, uint64_t offset) {
      for (int64_t i = 0, n = std::ssize(bytes) / size; i < n; ++i) {
        const float value = formats::load_scale<float>(bytes.data(), i, type);
        const bool nan = !std::isfinite(value), zero = value == 0 && fills,
                   negative = std::signbit(value) && !nan && positive;
        num_nan += nan, num_zero += zero, num_negative += negative;
        if (first < 0 && (nan || zero || negative)) first = static_cast<int64_t>(offset) / size + i;
      }
    });
    const auto report = [&](const char* rule, int64_t count, const char* what) {
      if (count > 0)
        fault(rule, weight.name, "{} of {} scales in \"{}\" are {}, the first fault at {}", count,
              tensor.num_bytes / static_cast<uint64_t>(size), tensor.name, what, first);
    };
    report("scale-nan", num_nan, "NaN or infinite");
    report("scale-zero", num_zero, "0");
    report("scale-negative", num_negative, "negative");
  }

  void check_global_scales() {
    std::map<std::string, const QuantizedWeight*> of_product;
    for (const StoredWeight& stored : checkpoint_->quantized) {
      const QuantizedWeight& weight = stored.weight;
      if (!has_global_scale(weight.spec) || !is_usable(weight.global_scale)) continue;
      const auto [entry, added] = of_product.emplace(fused_name(weight.name), &weight);
      const float other = entry->second->global_scale;
      if (!added && weight.global_scale != other)
        fault("global-scale-mismatch", weight.name, "the global scale is {}, but that of \"{}\" is {}",
              weight.global_scale, entry->second->name, other);
    }
  }

  void check_dense() {
    Decoder decoder(*checkpoint_);
    std::vector<float> values;
    for (size_t w = 0; w < checkpoint_->weights.size(); ++w) {
      const Weight& weight = checkpoint_->weights[w];
      if (weight.layout || !weight.dtype || !is_floating(*weight.dtype) || !weight.foreign.empty()) continue;
      for (int64_t begin = 0, n = num_elements(weight), count; begin < n; begin += count) {
        count = std::min(n - begin, kBlockElements);
        values.resize(static_cast<size_t>(count));
        decoder.decode(weight, begin, count, DType::f32, reinterpret_cast<std::byte*>(values.data()));
        const ValueRange range = value_range({values.data(), DType::f32, {count}, {}, {}}, {1});
        reporter_.poll();
        if (range.num_nonfinite == 0) continue;
        fault("dense-nonfinite", weight.name, "element {} is NaN or infinite", begin + range.first_nonfinite);
        break;
      }
    }
  }

  // ---- What the config says

  const Weight* find(const std::string& ending) const {
    for (const Weight& weight : checkpoint_->weights)
      if (weight.name.ends_with(ending)) return &weight;
    return nullptr;
  }

  void check_config() {
    if (checkpoint_->config.empty()) {
      if (checkpoint_->is_directory) fault("config-missing", "config.json", "there is none");
      return;
    }
    const Json json = config();
    check_shapes(json);
    check_tied(json);
    const Json* quantization = member(json, {"quantization_config", "compression_config", "quantization"});
    const auto quantized = std::ranges::find_if(
        checkpoint_->weights, [](const Weight& weight) { return weight.layout.has_value(); });
    if (quantized == checkpoint_->weights.end()) return;
    if (quantization == nullptr || !quantization->is_object())
      return fault("config-missing", "config.json", "it has no quantization_config, but \"{}\" is quantized",
                   quantized->name);
    check_format(*quantization);
    check_lists_of_modules(*quantization);
  }

  static std::string text(const Json& object, const char* key) {
    const auto value = object.find(key);
    return value != object.end() && value->is_string() ? value->get<std::string>() : std::string();
  }

  // Of gptq: patterns of modules that are dense, or of other bits.
  static bool has_dynamic(const Json& quantization) {
    const auto dynamic = quantization.find("dynamic");
    return dynamic != quantization.end() && dynamic->is_object() && !dynamic->empty();
  }

  // What is said of all weights alike. Several groups are of several formats.
  void check_format(const Json& quantization) {
    const std::string method = text(quantization, "quant_method");
    std::string format = text(quantization, "format");
    std::optional<int64_t> group_size, bits;
    if (!has_dynamic(quantization)) {
      group_size = number(quantization, {"group_size"});
      bits = number(quantization, {"bits"});
    }
    const auto groups = quantization.find("config_groups");
    const bool one_group = groups == quantization.end() || groups->size() == 1;
    if (const Json::json_pointer weights("/config_groups/group_0/weights");
        one_group && quantization.contains(weights) && quantization[weights].is_object()) {
      group_size = number(quantization[weights], {"group_size"});
      bits = number(quantization[weights], {"num_bits"});
    }
    for (const Weight& weight : checkpoint_->weights) {
      if (!weight.layout || weight.layout == Layout::halfbyte || weight.layout == Layout::mlx) continue;
      const FormatInfo& own = info(weight.spec.format);
      const bool fp8 = own.format == Format::fp8, is_float = own.scale_dtype || fp8;
      if (weight.layout == Layout::bitsandbytes) {  // groups and the rest lie beside the codes
        format = text(quantization, "bnb_4bit_quant_type");
        if (own.bits == 4 && !format.empty() && format != own.name)
          return fault("config-format", "config.json", "it says {}, but \"{}\" is {}", format, weight.name,
                       own.name);
        continue;
      }
      const bool mxfp8 = is_float && is_mxfp8(checkpoint_->quantized_weight(weight)->weight);
      if (mxfp8 && (method == "mxfp8" || method == "modelopt")) continue;  // of SGLang and ModelOpt
      const std::string own_format = mxfp8 ? "mxfp8-quantized" : compressed_tensors_format(own.format);
      if ((is_float && method != quant_method(*weight.layout)) ||
          (weight.layout == Layout::compressed_tensors && one_group && format != own_format))
        return fault("config-format", "config.json", "it says {} {}, but \"{}\" is {} of {}", method, format,
                     weight.name, own.name, to_string(*weight.layout));
      if (const auto block = quantization.find("weight_block_size");
          fp8 && block != quantization.end() && weight.scale_rows > 1 &&
          *block != Json::array({weight.scale_rows, weight.spec.group_size}))
        return fault("config-group-size", "config.json", "it says {}, but \"{}\" has blocks of {} x {}",
                     block->dump(), weight.name, weight.scale_rows, weight.spec.group_size);
      if (group_size && (is_float || weight.spec.granularity == Granularity::group) &&
          *group_size != weight.spec.group_size)
        return fault("config-group-size", "config.json", "it says {}, but \"{}\" has groups of {}",
                     *group_size, weight.name, weight.spec.group_size);
      if (bits && *bits != own.bits)
        return fault("config-bits", "config.json", "it says {}, but \"{}\" has codes of {}", *bits,
                     weight.name, own.bits);
    }
  }

  using Words = std::set<std::string, std::less<>>;

  static void add_words(const Json& list, Words& words) {
    if (list.is_string()) words.insert(list.get<std::string>());
    if (list.is_array())
      for (const Json& entry : list) add_words(entry, words);
  }
  // Whether a word is the name of the module or a part of it between dots: of a parent, or "mlp.up_proj".
  static bool have_part(const Words& words, std::string_view module) {
    for (size_t begin = 0;; ++begin) {
      for (size_t end = begin; end != std::string_view::npos;) {
        end = module.find('.', end + 1);
        if (words.contains(module.substr(begin, end - begin))) return true;
      }
      begin = module.find('.', begin);
      if (begin == std::string_view::npos) return false;
    }
  }

  // A reader makes a dense layer of what is listed, and a quantized one of what is not; one of gptq the
  // reverse, if there is such a list. Others go by the tensors: there is none for mlx and halfbyte.
  void check_lists_of_modules(const Json& quantization) {
    Words dense, converted;
    for (const char* key : {"ignore", "exclude_modules", "modules_to_not_convert", "llm_int8_skip_modules"})
      if (const auto list = quantization.find(key); list != quantization.end()) add_words(*list, dense);
    constexpr const char* kConverted = "modules_in_block_to_quantize";
    if (const auto list = quantization.find(kConverted); list != quantization.end())
      add_words(*list, converted);
    const bool patterns =
        has_dynamic(quantization) || std::ranges::any_of(dense, [](const std::string& word) {
          return word.starts_with("re:") || word.find('*') != std::string::npos;
        });
    const auto kind_of = [](const std::string& module) { return module.substr(module.rfind('.') + 1); };
    Words kinds;  // "q_proj" of modules that are quantized somewhere
    bool goes_by_tensors = true, whole_names = true;
    for (const Weight& weight : checkpoint_->weights) {
      if (!weight.layout) continue;
      const std::string module = module_of(weight.name);
      kinds.insert(kind_of(module));
      goes_by_tensors &= weight.layout == Layout::mlx || weight.layout == Layout::halfbyte;
      whole_names &= weight.layout == Layout::compressed_tensors;
      if (dense.contains(module))
        fault("config-ignore", weight.name, "it is quantized, but config.json lists \"{}\" as dense", module);
      const bool in_block = std::ranges::any_of(module, [](char c) { return c >= '0' && c <= '9'; });
      if (!converted.empty() && in_block && !have_part(converted, module))
        fault("config-ignore", weight.name, "it is quantized, but {} of config.json does not list \"{}\"",
              kConverted, module);
    }
    if (patterns || goes_by_tensors) return;
    for (const Weight& weight : checkpoint_->weights) {
      const std::string module = module_of(weight.name);
      if (weight.layout || weight.shape.size() != 2 || !weight.name.ends_with(kWeightSuffix) ||
          !kinds.contains(kind_of(module)))
        continue;
      if (converted.empty()) {
        if (!(whole_names ? dense.contains(module) : have_part(dense, module)))
          fault("dense-unlisted", weight.name, "it is dense, but config.json does not list \"{}\"", module);
      } else if (have_part(converted, module)) {
        fault("dense-unlisted", weight.name, "it is dense, but {} of config.json lists \"{}\"", kConverted,
              module);
      }
    }
  }

  void check_shapes(const Json& json) {
    struct Rule {
      const char* ending;
      size_t axis;
      const char* key;
    };
    static constexpr Rule kRules[] = {
        {"embed_tokens.weight", 0, "vocab_size"},      {"embed_tokens.weight", 1, "hidden_size"},
        {"self_attn.q_proj.weight", 1, "hidden_size"}, {"self_attn.o_proj.weight", 0, "hidden_size"},
        {".mlp.gate_proj.weight", 1, "hidden_size"},   {".mlp.down_proj.weight", 0, "hidden_size"}};
    for (const Rule& rule : kRules) {
      const auto wanted = number(json, {rule.key});
      if (!wanted) continue;
      for (const Weight& weight : checkpoint_->weights)
        if (weight.name.ends_with(rule.ending) && weight.shape.size() == 2 &&
            weight.shape[rule.axis] != *wanted)
          fault("config-shape", weight.name, "it is {}, but config.json says {} {}", shape_text(weight.shape),
                rule.key, *wanted);
    }
  }

  void check_tied(const Json& json) {
    const Json* tied = member(json, {"tie_word_embeddings"});
    const Weight *head = find("lm_head.weight"), *embedding = find("embed_tokens.weight");
    if (tied == nullptr || *tied != Json(true) || head == nullptr || embedding == nullptr) return;
    const auto differ = [&] {
      if (head->shape != embedding->shape) return true;
      Decoder decoder(*checkpoint_);
      std::vector<float> a, b;
      for (int64_t begin = 0, n = num_elements(*head), count; begin < n; begin += count) {
        count = std::min(n - begin, kBlockElements);
        a.resize(static_cast<size_t>(count));
        b.resize(a.size());
        decoder.decode(*head, begin, count, DType::f32, reinterpret_cast<std::byte*>(a.data()));
        decoder.decode(*embedding, begin, count, DType::f32, reinterpret_cast<std::byte*>(b.data()));
        if (std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) != 0) return true;
      }
      return false;
    };
    if (differ())
      fault("tied-weights", head->name, "config.json says tie_word_embeddings, but it is not \"{}\"",
            embedding->name);
  }

  static constexpr int64_t kMostFaults = 10000;  // of lists

  const std::string path_;
  const ProgressFunction& progress_;
  ProgressReporter reporter_;
  std::unique_ptr<Checkpoint::Impl> checkpoint_;
  std::vector<Fault> faults_;
};

}  // namespace
}  // namespace io

std::vector<Fault> verify_checkpoint(const std::string& path, const ProgressFunction& progress) {
  return io::Verifier(path, progress).run();
}

}  // namespace halfbyte
