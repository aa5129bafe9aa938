// The layouts of GPTQ and of AWQ. Both store the transpose of a weight [out, in]: words of codes, zero points
// and scales for each group of inputs. Their shapes tell bits and groups; what the zero points are, the
// config tells.
#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "io/checkpoint.h"
#include "io/columnwise.h"
#include "io/config.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

constexpr std::string_view kCodes = ".qweight";
constexpr int kWordBits = 32;
constexpr uint64_t kScanBytes = 1 << 20;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// The group of each column as it is stored.
std::vector<int32_t> group_index(const QuantizedWeight& weight) {
  const int64_t cols = weight.cols(), size = weight.quant_shape().group_size;
  std::vector<int32_t> groups(static_cast<size_t>(cols));
  for (int64_t i = 0; i < cols; ++i) {
    const int64_t column = weight.words.order.empty() ? i : weight.words.order[static_cast<size_t>(i)];
    groups[static_cast<size_t>(column)] = static_cast<int32_t>(i / size);
  }
  return groups;
}

std::vector<Part> parts(const QuantizedWeight& weight) {
  const int bits = info(weight.spec.format).bits;
  const int64_t out = weight.rows(), in = weight.cols(), groups = weight.quant_shape().groups_per_row;
  const bool awq = weight.layout == Layout::awq;
  const std::string module = module_of(weight.name);
  std::vector<Part> parts = {
      {Role::codes, module + ".qweight", "I32",
       awq ? std::vector<int64_t>{in, out * bits / kWordBits}
           : std::vector<int64_t>{in * bits / kWordBits, out}},
      {Role::scales, module + ".scales", dtype_to_safetensors(weight.spec.scale_dtype), {groups, out}}};
  if (has_zeros(weight.spec)) {
    parts.push_back({Role::zeros, module + ".qzeros", "I32", {groups, out * bits / kWordBits}});
  } else if (weight.words.has_zeros) {
    const int zero = (1 << (bits - 1)) - (weight.words.zeros_less_one ? 1 : 0);
    parts.push_back({Role::constant,
                     module + ".qzeros",
                     "I32",
                     {groups, out * bits / kWordBits},
                     bytes_of(columnwise_zero_words(weight, zero))});
  }
  if (weight.words.has_group_index)
    parts.push_back({Role::constant, module + ".g_idx", "I32", {in}, bytes_of(group_index(weight))});
  return parts;
}

// ---- Reading

// The tensors of one weight, and what the config says of it.
struct Words {
  std::string module;
  const StoredTensor *codes, *scales, *zeros, *groups;  // zeros, groups: null if there are none
  const WordConfig& config;
};

// Of config.json, of the files beside it that old tools wrote, or of the metadata of a file that stands
// alone.
WordConfig read_config(const Checkpoint::Impl& checkpoint) {
  try {
    if (auto config = word_config_of_config(checkpoint.config)) return *config;
    for (const auto& [name, text] : checkpoint.quantization_configs)
      if (auto config = word_config(text, name)) return *config;
    for (const auto& file : checkpoint.files)
      for (const auto& [key, value] : file.metadata)
        if (key == kWordMetadata)
          if (auto config = word_config(value, "__metadata__: " + key)) return *config;
  } catch (const Error&) {
    // The shapes tell most. Whoever writes a checkpoint parses it again, and says so.
  }
  return {};
}

Format integer_format(int64_t bits) {
  for (const FormatInfo& format : all_formats())
    if (format.kind == FormatKind::integer && format.bits == bits) return format.format;
  HALFBYTE_FAIL(bug, "no integers of {} bits", bits);
}

// Whether all zero points are stored as this one. Most weights that are not symmetric end it at once.
bool zeros_are(const Checkpoint::Impl& checkpoint, const StoredTensor& zeros, const QuantizedWeight& weight,
               int zero) {
  const std::vector<uint32_t> period = columnwise_zero_words(weight, zero);
  std::vector<uint32_t> words, expected;
  // Whole periods: a row of the tensor has them too.
  const uint64_t period_bytes = period.size() * sizeof(uint32_t),
                 most = kScanBytes / period_bytes * period_bytes;
  for (uint64_t offset = 0, size = period_bytes; offset < zeros.num_bytes; offset += size, size = most) {
    size = std::min(size, zeros.num_bytes - offset);
    words.resize(size / sizeof(uint32_t));
    checkpoint.read(zeros, offset, std::as_writable_bytes(std::span(words)));
    while (expected.size() < words.size()) expected.insert(expected.end(), period.begin(), period.end());
    if (!std::equal(words.begin(), words.end(), expected.begin())) return false;
  }
  return true;
}

// What shares a scale, of so many groups: as the config says, where it fits. Others may have groups that
// divide the columns.
void set_groups(const Words& words, QuantizedWeight& weight, int64_t groups) {
  const int64_t in = weight.cols();
  weight.spec.granularity = groups == 1 ? Granularity::channel : Granularity::group;
  if (groups == 1) return;
  const int64_t said = words.config.group_size.value_or(0);
  const bool fits = said > 0 && ceil_div(in, said) == groups;
  HALFBYTE_CHECK(fits || (groups > 0 && in % groups == 0), bad_input,
                 "tensor \"{}\": {} columns do not divide into {} groups", printable(words.scales->name), in,
                 groups);
  weight.spec.group_size = fits ? said : in / groups;
}

// Columns that are not in the order of their groups are in that order natively; this finds which is which.
void read_order(const Checkpoint::Impl& checkpoint, const StoredTensor& tensor, QuantizedWeight& weight) {
  const QuantShape shape = weight.quant_shape();
  HALFBYTE_CHECK(tensor.dtype == "I32" && tensor.shape == std::vector<int64_t>{shape.cols}, bad_input,
                 "tensor \"{}\" must be I32 [{}], the group of each column, got {} [{}]",
                 printable(tensor.name), shape.cols, tensor.dtype, fmt::join(tensor.shape, ", "));
  std::vector<int32_t> groups(static_cast<size_t>(shape.cols));
  checkpoint.read(tensor, 0, std::as_writable_bytes(std::span(groups)));
  std::vector<int64_t> next(
      static_cast<size_t>(shape.groups_per_row));  // place of the next column of a group
  for (size_t group = 0; group < next.size(); ++group)
    next[group] = static_cast<int64_t>(group) * shape.group_size;
  std::vector<int32_t> order(groups.size());
  bool in_order = true;
  for (size_t column = 0; column < groups.size(); ++column) {
    const int32_t group = groups[column];
    HALFBYTE_CHECK(group >= 0 && group < shape.groups_per_row, bad_input,
                   "tensor \"{}\": column {} is in group {}, but there are {} groups", printable(tensor.name),
                   column, group, shape.groups_per_row);
    const int64_t place = next[static_cast<size_t>(group)]++;
    const int64_t end = std::min((int64_t{group} + 1) * shape.group_size, shape.cols);
    HALFBYTE_CHECK(place < end, bad_input, "tensor \"{}\": group {} has more than {} columns",
                   printable(tensor.name), group, end - int64_t{group} * shape.group_size);
    order[static_cast<size_t>(place)] = static_cast<int32_t>(column);
    in_order &= place == static_cast<int64_t>(column);
  }
  if (in_order) return;
  weight.words.order = std::move(order);
  weight.note = "act-order";
}

void add_note(QuantizedWeight& weight, const std::string& note) {
  weight.note += (weight.note.empty() ? "" : "; ") + note;
}

// What a zero point is: as stored, or that plus 1. Symmetric weights tell by its value, whatever the config
// says, which is wrong in published models. Returns why the weight is not read; empty if it is.
std::string read_zero_points(const Checkpoint::Impl& checkpoint, const Words& words,
                             QuantizedWeight& weight) {
  const std::string& format = words.config.format;
  const bool version1 = format == "gptq" || format == "auto_round:auto_gptq" || format == "auto_round:gptq";
  const bool version2 = format == "gptq_v2", awq = weight.layout == Layout::awq;
  const int middle = 1 << (info(weight.spec.format).bits - 1);
  const auto are_all = [&](bool less_one) {
    weight.words.zeros_less_one = less_one;
    return zeros_are(checkpoint, *words.zeros, weight, middle - (less_one ? 1 : 0));
  };
  if (awq) {
    weight.spec.asymmetric = !are_all(false);
    return "";
  }
  if (words.config.symmetric.value_or(true) && (are_all(true) || are_all(false))) {
    weight.spec.asymmetric = false;
    if (weight.words.zeros_less_one ? version2 : version1)
      add_note(weight, fmt::format("zero points as gptq{} has them, though the config says \"{}\"",
                                   weight.words.zeros_less_one ? "" : "_v2", format));
    return "";
  }
  if (!version1 && !version2)
    return fmt::format(
        "zero points of version 1 are stored less 1, those of version 2 as they are, and {}: set "
        "\"checkpoint_format\" in its quantization_config to \"gptq\" (version 1, what tools wrote that had "
        "no such "
        "key) or to \"gptq_v2\"",
        format.empty() ? "no \"checkpoint_format\" says which these are"
                       : fmt::format("of \"{}\" it is not known which these are", printable(format)));
  if (words.config.symmetric.value_or(false))
    add_note(weight, "with zero points, though the config says symmetric");
  weight.spec.asymmetric = !are_all(version1);
  return "";
}

// Why codes of these bits and this config are not read; empty if they are.
std::string not_read_reason(const Words& words, Layout layout, int64_t bits) {
  const auto is_one_of = [](const std::string& word, std::initializer_list<const char*> list) {
    return word.empty() || std::ranges::find(list, word) != list.end();
  };
  const WordConfig& config = words.config;
  const bool awq = layout == Layout::awq;
  const bool method = is_one_of(config.method, {awq ? "awq" : "gptq", "auto-round", "auto_round"});
  if (!method)
    return fmt::format("its tensors are those of {}, but its quant_method is \"{}\"", to_string(layout),
                       printable(config.method));
  const bool format = awq ? is_one_of(config.format, {"gemm", "auto_round:auto_awq", "auto_round:awq"})
                          : is_one_of(config.format, {"gptq", "gptq_v2", "gptq_p", "auto_round:auto_gptq",
                                                      "auto_round:gptq"});
  if (!format) return fmt::format("its format \"{}\" is not known", printable(config.format));
  if (awq && bits != 4) return fmt::format("it has codes of {} bits, and of awq only 4 bits are read", bits);
  if (!awq && bits != 2 && bits != 3 && bits != 4 && bits != 5 && bits != 6 && bits != 8)
    return fmt::format("it has codes of {} bits", bits);
  return "";
}

// Appends the weight, or why it is not read.
void read_weight(const Checkpoint::Impl& checkpoint, const Words& words, Layout layout,
                 std::optional<DType> model_dtype, FoundWeights& found) {
  const bool awq = layout == Layout::awq;
  const StoredTensor& codes = *words.codes;
  const int64_t out = words.scales->shape[1], groups = words.scales->shape[0];
  const std::string name = printable(codes.name);
  const auto refuse = [&](const std::string& reason) { found.not_read[codes.name] = reason; };
  if (words.zeros == nullptr && !(awq && words.config.symmetric.value_or(false)))
    return refuse("it has no zero points (.qzeros)");

  // Zero points of a group, one for each output, are packed like codes.
  const int64_t words_of_zeros = awq                              ? codes.shape[1]
                                 : words.zeros->shape.size() == 2 ? words.zeros->shape[1]
                                                                  : 0;
  HALFBYTE_CHECK(out > 0 && codes.shape[0] > 0 && groups > 0, bad_input,
                 "tensor \"{}\" is of an empty weight", name);
  HALFBYTE_CHECK(words_of_zeros > 0 && words_of_zeros <= out && words_of_zeros * kWordBits % out == 0,
                 bad_input, "tensor \"{}\": words [{}] for {} outputs are no codes of whole bits",
                 printable(awq ? codes.name : words.zeros->name),
                 fmt::join((awq ? codes : *words.zeros).shape, ", "), out);
  const int64_t bits = words_of_zeros * kWordBits / out;
  if (const std::string reason = not_read_reason(words, layout, bits); !reason.empty()) return refuse(reason);
  HALFBYTE_CHECK(awq || codes.shape[0] * kWordBits % bits == 0, bad_input,
                 "tensor \"{}\": {} words are not whole codes of {} bits", name, codes.shape[0], bits);
  const int64_t in = awq ? codes.shape[0] : codes.shape[0] * kWordBits / bits;
  HALFBYTE_CHECK(in < INT32_MAX && groups <= in, bad_input, "tensor \"{}\": {} groups of {} columns",
                 printable(words.scales->name), groups, in);

  QuantizedWeight weight;
  weight.layout = layout;
  weight.name = words.module + ".weight";
  weight.shape = {out, in};
  weight.spec.format = integer_format(bits);
  weight.spec.scale_dtype = *dtype_from_safetensors(words.scales->dtype);
  weight.dtype = words.config.dtype ? *words.config.dtype : model_dtype.value_or(weight.spec.scale_dtype);
  weight.words.has_zeros = words.zeros != nullptr;
  weight.words.has_group_index = words.groups != nullptr;
  weight.words.planar = !awq && (words.config.format == "gptq_p" || bits == 5 || bits == 6);
  const int64_t unit = columnwise_unit(weight);
  HALFBYTE_CHECK(out % unit == 0 && (awq || in % unit == 0), bad_input,
                 "tensor \"{}\": codes of {} bits for a weight [{}, {}] do not fill their words", name, bits,
                 out, in);
  set_groups(words, weight, groups);
  if (words.zeros != nullptr) {
    const std::vector<int64_t> shape = {groups, words_of_zeros};
    HALFBYTE_CHECK(words.zeros->dtype == "I32" && words.zeros->shape == shape, bad_input,
                   "tensor \"{}\" must be I32 [{}], got {} [{}]", printable(words.zeros->name),
                   fmt::join(shape, ", "), words.zeros->dtype, fmt::join(words.zeros->shape, ", "));
    if (const std::string reason = read_zero_points(checkpoint, words, weight); !reason.empty())
      return refuse(reason);
  }
  if (words.groups != nullptr) read_order(checkpoint, *words.groups, weight);
  found.weights.push_back(std::move(weight));
}

void match(const Checkpoint::Impl& checkpoint, Layout layout, FoundWeights& found) {
  std::optional<WordConfig> config;  // read where it is needed
  std::optional<DType> model_dtype;
  for (const StoredTensor& codes : checkpoint.tensors) {
    if (!codes.name.ends_with(kCodes) || codes.dtype != "I32" || codes.shape.size() != 2) continue;
    const std::string module = codes.name.substr(0, codes.name.size() - kCodes.size());
    const StoredTensor* scales = checkpoint.find(module + ".scales");
    if (scales == nullptr || scales->shape.size() != 2) continue;
    if (scales->dtype != "F16" && scales->dtype != "BF16" && scales->dtype != "F32") continue;
    // Scales are [groups, out] in both: GPTQ packs along the inputs, AWQ along the outputs.
    const bool packs_inputs = codes.shape[1] == scales->shape[1];
    if (layout == Layout::gptq ? !packs_inputs : codes.shape[1] >= scales->shape[1]) continue;
    if (!config) {
      config = read_config(checkpoint);
      model_dtype = dtype_of_config(checkpoint.config);
    }
    const Words words{module,
                      &codes,
                      scales,
                      checkpoint.find(module + ".qzeros"),
                      layout == Layout::gptq ? checkpoint.find(module + ".g_idx") : nullptr,
                      *config};
    read_weight(checkpoint, words, layout, model_dtype, found);
  }
}

}  // namespace

const LayoutInfo& gptq_layout() {
  static const LayoutInfo& layout =
      *new LayoutInfo{.layout = Layout::gptq,
                      .name = "gptq",
                      .formats = {Format::int4, Format::int2, Format::int3, Format::int8},
                      .asymmetric = true,
                      .granularities = {Granularity::group, Granularity::channel},
                      .default_group_size = 128,
                      .whole_groups = true,
                      .scale_rules = {ScaleRule::half_range, ScaleRule::absmax},
                      .scale_dtypes = ScaleDTypes::f16,
                      .many_specs = false,
                      .turns_conv1d = true,
                      .apart = true,
                      .packing = Packing::gptq,
                      .parts = parts,
                      .match = [](const Checkpoint::Impl& checkpoint, FoundWeights& found) {
                        match(checkpoint, Layout::gptq, found);
                      }};
  return layout;
}

const LayoutInfo& awq_layout() {
  static const LayoutInfo& layout =
      *new LayoutInfo{.layout = Layout::awq,
                      .name = "awq",
                      .formats = {Format::int4},
                      .asymmetric = true,
                      .granularities = {Granularity::group, Granularity::channel},
                      .default_group_size = 128,
                      .whole_groups = true,
                      .scale_rules = {ScaleRule::half_range, ScaleRule::absmax},
                      .scale_dtypes = ScaleDTypes::f16,
                      .many_specs = false,
                      .apart = true,
                      .packing = Packing::awq,
                      .parts = parts,
                      .match = [](const Checkpoint::Impl& checkpoint, FoundWeights& found) {
                        match(checkpoint, Layout::awq, found);
                      }};
  return layout;
}

}  // namespace halfbyte::io
