#include "io/selection.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "core/checks.h"
#include "core/words.h"
#include "io/json.h"
#include "io/mlx_model.h"

namespace halfbyte {
namespace {

constexpr std::array<Word<ExpertForm>, 3> kExpertForms{{{ExpertForm::per_expert, "per-expert"},
                                                        {ExpertForm::parametrize, "parametrize"},
                                                        {ExpertForm::experts4bit, "experts4bit"}}};
constexpr std::array<Word<Reader>, 5> kReaders{{{Reader::transformers_5, "transformers-5"},
                                                {Reader::transformers_4, "transformers-4"},
                                                {Reader::vllm, "vllm"},
                                                {Reader::mlx_lm, "mlx-lm"},
                                                {Reader::none, "none"}}};

}  // namespace

const char* to_string(ExpertForm form) { return word_of(kExpertForms, form); }
ExpertForm parse_expert_form(std::string_view word) {
  return value_of(kExpertForms, word, "form of experts");
}

const char* to_string(Reader reader) { return word_of(kReaders, reader); }
Reader parse_reader(std::string_view word) {
  return word == "transformers" ? Reader::transformers_5 : value_of(kReaders, word, "reader");
}

namespace io {
namespace {

constexpr size_t kMaxMatchedName = 1024;  // std::regex recurses
// Bytes of a pattern of others, and how often braces may repeat them in all: the states of its automaton.
constexpr size_t kMaxPatternBytes = 4096, kMaxPatternStates = 8192;

// No fewer than the automaton of the pattern has. Other braces are errors of the pattern.
size_t num_states(const std::string& pattern) {
  size_t states = pattern.size();
  for (size_t at = 0; (at = pattern.find('{', at)) != std::string::npos && states <= kMaxPatternStates;
       ++at) {
    size_t most = 1;
    for (size_t begin = at + 1, end; begin < pattern.size(); begin = end + 1) {
      end = std::min(pattern.find_first_not_of("0123456789", begin), pattern.size());
      if (end - begin > 4) return kMaxPatternStates + 1;
      if (end > begin) most = std::max<size_t>(most, std::stoul(pattern.substr(begin, end - begin)));
      if (end == pattern.size() || pattern[end] != ',') break;
    }
    states *= most;
  }
  return states;
}

// A backslash and a number. std::regex does not see numbers that overflow.
bool has_back_reference(const std::string& pattern) {
  for (size_t at = 0; (at = pattern.find('\\', at)) != std::string::npos && at + 1 < pattern.size(); at += 2)
    if (pattern[at + 1] >= '1' && pattern[at + 1] <= '9') return true;
  return false;
}

// The regular expressions of --include or --exclude, which are searched in names.
class NameFilter {
 public:
  // Anything that backtracks would take time exponential in a name for some, so all are followed at once, and
  // a match is one of the whole name. There are no back-references then.
  NameFilter(const char* option, const std::vector<std::string>& expressions) : option_(option) {
    constexpr auto kSyntax = std::regex::ECMAScript | std::regex_constants::__polynomial;
    for (const std::string& text : expressions) try {
        HALFBYTE_CHECK(
            text.size() <= kMaxPatternBytes && num_states(text) <= kMaxPatternStates, usage,
            "{}: \"{}\" is too long, or repeats too much: at most {} bytes, and with repetitions in "
            "braces {}",
            option_, printable(text), kMaxPatternBytes, kMaxPatternStates);
        HALFBYTE_CHECK(!has_back_reference(text), usage, "{}: \"{}\" has a back-reference, as \\1", option_,
                       printable(text));
        std::regex alone(text, kSyntax);  // which must be an expression
        expressions_.emplace_back("[\\s\\S]*(?:" + text + ")[\\s\\S]*", kSyntax | std::regex::optimize);
      } catch (const std::regex_error& error) {
        HALFBYTE_FAIL(usage, "{}: \"{}\" is not a regular expression: {}", option_, printable(text),
                      error.what());
      }
  }
  bool matches(const std::string& name) const {
    if (name.size() > kMaxMatchedName) return false;
    try {
      return std::ranges::any_of(expressions_,
                                 [&](const std::regex& e) { return std::regex_match(name, e); });
    } catch (const std::regex_error& error) {
      HALFBYTE_FAIL(usage, "{}: too complex for \"{}\": {}", option_, printable(name), error.what());
    }
  }

 private:
  const char* option_;
  std::vector<std::regex> expressions_;
};

// For architectures that the table does not have. Names of embeddings; of heads, norms and routers, which
// lose more than they save.
bool names_embedding(std::string_view name) {
  if (name.find("embed") != name.npos || name.find("relative_attention_bias") != name.npos) return true;
  return std::ranges::any_of(
      std::to_array<std::string_view>({".wte.weight", ".wpe.weight", ".shared.weight"}),
      [&](std::string_view end) { return name.ends_with(end) || name == end.substr(1); });
}
bool names_kept(std::string_view name) {
  constexpr auto kWhole =
      std::to_array<std::string_view>({"output.weight", "head.weight", "score.weight", "classifier.weight"});
  constexpr auto kEnds =
      std::to_array<std::string_view>({"gate.weight", "router.weight", "router.layer.weight"});
  return name.find("lm_head") != name.npos || name.find("norm") != name.npos ||
         std::ranges::find(kWhole, name) != kWhole.end() ||
         std::ranges::any_of(kEnds, [&](std::string_view end) { return name.ends_with(end); });
}

bool is_quantizable(const std::optional<DType>& dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

std::string without_suffix(const std::string& name, std::string_view suffix) {
  return name.ends_with(suffix) ? name.substr(0, name.size() - suffix.size()) : "";
}

const char* word(ModuleRole role) {
  switch (role) {
    case ModuleRole::plain:
    case ModuleRole::expert:
      return "";
    case ModuleRole::head:
      return "head";
    case ModuleRole::router:
      return "router";
    case ModuleRole::projector:
      return "projector";
    case ModuleRole::adapter:
      return "adapter";
    case ModuleRole::vision:
      return "vision";
    case ModuleRole::audio:
      return "audio";
  }
  HALFBYTE_FAIL(bug, "no role {}", static_cast<int>(role));
}

// Why a weight with a module stays dense by default; empty: it does not. `reads_only`: the model is nothing
// but what reads images or sound.
std::string kept_reason(const ModuleInfo& module, bool reads_only = false) {
  switch (module.kind) {
    case ModuleKind::embedding:
      return "embedding";
    case ModuleKind::attention:
    case ModuleKind::convolution:
    case ModuleKind::parameter:
      return *word(module.role) != '\0' ? word(module.role) : "no linear layer";
    default:
      return reads_only && (module.role == ModuleRole::vision || module.role == ModuleRole::audio)
                 ? ""
                 : word(module.role);
  }
}

bool is_of_words(Layout layout) { return layout == Layout::gptq || layout == Layout::awq; }

// Readers that load the layout, the default first. What is said of vLLM and of transformers 4 comes from
// their documents and sources; no test runs them.
std::vector<Reader> readers_of(Layout layout) {
  switch (layout) {
    case Layout::bitsandbytes:
    case Layout::compressed_tensors:
    case Layout::gptq:
    case Layout::awq:
      return {Reader::transformers_5, Reader::transformers_4, Reader::vllm};
    case Layout::mlx:
      return {Reader::mlx_lm};
    case Layout::modelopt:
      return {Reader::vllm};
    case Layout::fp8:
    case Layout::gpt_oss:
      return {Reader::transformers_5, Reader::vllm};
    case Layout::halfbyte:
      return {};
  }
  HALFBYTE_FAIL(bug, "no layout {}", static_cast<int>(layout));
}

// Whether these experts are of the form that gpt-oss has: all of a layer in one tensor [E, in, out], for
// which readers of quantized weights have one tensor, too.
bool are_turned(const ModuleInfo& module) {
  return module.kind == ModuleKind::experts && module.transposed && !module.apart;
}

// Whether the experts of a tensor [E, ...] are written as a linear layer each: only those whose parts have
// the names that readers give them.
bool takes_apart(Reader reader, Layout layout, const Weight& weight, const ModuleInfo& module) {
  const std::string own = without_suffix(weight.name, ".weight");
  const std::string& name = own.empty() ? weight.name : own;
  if (module.kind != ModuleKind::experts || weight.shape.size() != 3 || !module.operations.empty() ||
      !(name.ends_with("experts.gate_up_proj") || name.ends_with("experts.down_proj")))
    return false;
  if (is_of_words(layout)) return reader == Reader::vllm || reader == Reader::none;
  if (reader == Reader::transformers_5) return module.apart;
  // transformers 4 has them as they are stored.
  return reader != Reader::transformers_4 && layout_info(layout).apart;
}

// Why the reader does not load the format in this layout; empty: it does.
std::string cannot_read(Reader reader, Layout layout, const QuantizeOptions& options) {
  const int bits = info(options.format).bits;
  if (reader == Reader::vllm && layout == Layout::gptq && (options.asymmetric || (bits != 4 && bits != 8)))
    return "vllm reads gptq of 4 and 8 bits without zero points only";
  return "";
}

// Layers of a list have a number in their names. The name of the list; empty: it is in none.
std::string list_of_layers(const std::string& module) {
  for (size_t dot = module.find('.'); dot != std::string::npos; dot = module.find('.', dot + 1))
    if (const size_t end = std::min(module.find('.', dot + 1), module.size());
        end > dot + 1 && module.find_first_not_of("0123456789", dot + 1) >= end)
      return module.substr(0, dot);
  return "";
}

// Why the reader would not find the weight of this module, quantized; empty: it does. `one_expert`: experts
// that are written one by one.
std::string cannot_load(Reader reader, Layout layout, bool asymmetric, const ModuleInfo& module,
                        bool one_expert, bool tied) {
  if (reader == Reader::none || layout == Layout::halfbyte || layout == Layout::mlx) return "";
  if (layout == Layout::gpt_oss)
    return are_turned(module) ? "" : "it is no tensor of experts as gpt-oss has them";
  if (tied && !module.tied_to.empty())
    return fmt::format("it shares its weight with {}, which is dense", module.tied_to);
  const bool bitsandbytes = layout == Layout::bitsandbytes, version5 = reader == Reader::transformers_5;
  if (layout == Layout::gptq && reader != Reader::vllm && list_of_layers(module.module).empty())
    return fmt::format("{} reads gptq in lists of layers only", to_string(reader));
  switch (module.kind) {
    case ModuleKind::linear:
      if (module.kept_f32) return "transformers keeps it in a wider dtype";
      if (version5 && !module.operations.empty()) return "transformers makes it of other tensors";
      return "";
    case ModuleKind::linear_subclass:
      return bitsandbytes && version5 ? "bitsandbytes replaces nn.Linear, not classes derived from it" : "";
    case ModuleKind::conv1d:
      return bitsandbytes || layout == Layout::gptq
                 ? ""
                 : fmt::format("{} replaces nn.Linear, not the Conv1D of transformers", to_string(layout));
    case ModuleKind::experts:
      if (!one_expert)
        return fmt::format("{} holds these experts in one tensor, which it reads dense only",
                           to_string(reader));
      if (version5 && module.apart && !is_of_words(layout)) return "";
      if (version5 && is_of_words(layout))
        return fmt::format("{} holds experts in one tensor, which it reads dense only", to_string(reader));
      if (bitsandbytes && reader != Reader::transformers_4)
        return fmt::format("{} holds experts in one tensor, which it reads dense only", to_string(reader));
      if (asymmetric && version5) return "transformers-5 reads experts without zero points only";
      return "";
    case ModuleKind::embedding:
      return "it reads embeddings dense only";
    default:
      return "it is no linear layer";
  }
}

// A linear layer for each expert of a tensor [E, ...].
std::vector<OutputWeight> experts_apart(const Checkpoint::Impl& checkpoint, size_t index,
                                        const ModuleInfo& module) {
  const Weight& weight = checkpoint.weights[index];
  const std::string name =
      without_suffix(weight.name, ".weight").empty() ? weight.name : without_suffix(weight.name, ".weight");
  const size_t dot = name.rfind('.');
  const std::string path = name.substr(0, dot), own = name.substr(dot + 1);
  const std::vector<std::string> projections = own.starts_with("gate_up")
                                                   ? std::vector<std::string>{"gate_proj", "up_proj"}
                                                   : std::vector<std::string>{"down_proj"};
  const auto parts = static_cast<int64_t>(projections.size());
  // Rows of a matrix of the weight, or of what is stored of it, where that has rows.
  const StoredWeight* quantized = checkpoint.quantized_weight(weight);
  const bool as_stored = quantized != nullptr && quantized->transposed;
  const std::vector<int64_t>& shape = as_stored ? quantized->weight.shape : weight.shape;
  const bool in_columns = module.transposed && !as_stored;
  const int64_t experts = shape[0], all_rows = in_columns ? shape[2] : shape[1],
                cols = in_columns ? shape[1] : shape[2], rows = all_rows / parts;
  HALFBYTE_CHECK(all_rows % parts == 0, bad_input, "weight \"{}\" [{}] cannot be divided into gate and up",
                 printable(weight.name), fmt::join(weight.shape, ", "));
  const int64_t row_stride = in_columns ? 1 : cols, col_stride = in_columns ? all_rows : 1;
  const int64_t step = module.interleaved ? parts : 1, next = module.interleaved ? 1 : rows;
  std::vector<OutputWeight> result;
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t p = 0; p < parts; ++p)
      result.push_back({fmt::format("{}.{}.{}.weight", path, e, projections[static_cast<size_t>(p)]),
                        {rows, cols},
                        {{index, e * all_rows * cols + p * next * row_stride, rows, step * row_stride,
                          col_stride, as_stored}}});
  return result;
}

// Names below this one too.
constexpr char kBelow = '.';

// The names by which a reader is told that a weight is dense: that of its module in transformers 5, and that
// which it has in the checkpoint, which may be that of other readers.
std::vector<std::string> skips_of_weight(const std::string& name, const std::optional<ModuleInfo>& module) {
  std::vector<std::string> skips;
  const auto add = [&](std::string skip) {
    if (!skip.empty() && std::ranges::find(skips, skip) == skips.end()) skips.push_back(std::move(skip));
  };
  const std::string own = without_suffix(name, ".weight");
  if (!module) {
    add(own);
    return skips;
  }
  const auto experts_of = [](const std::string& of) {
    const size_t at = of.find("experts.");
    return at == std::string::npos ? "" : of.substr(0, at + 8);
  };
  switch (module->kind) {
    case ModuleKind::experts:
      if (module->apart || !module->operations.empty()) {  // linear layers in some readers
        add(experts_of(module->module));
        add(experts_of(name));
      }
      return skips;
    case ModuleKind::attention:
      if (name.find("out_proj") == std::string::npos) return skips;
      add(module->module);
      break;
    case ModuleKind::linear:
    case ModuleKind::linear_subclass:
    case ModuleKind::conv1d:
      add(module->module);
      break;
    case ModuleKind::parameter:
      if (own.empty()) return skips;
      add(without_suffix(module->module, ".weight"));
      break;
    default:
      return skips;
  }
  add(own);
  return skips;
}

nlohmann::json config_of(const Checkpoint::Impl& checkpoint) {
  return checkpoint.config.empty() ? nlohmann::json() : config_json(checkpoint.config);
}

class Selector {
 public:
  Selector(const Checkpoint::Impl& checkpoint, const LayoutInfo& layout, const QuantizeOptions& options,
           const std::set<std::string>* chosen)
      : checkpoint_(checkpoint),
        layout_(layout),
        options_(options),
        chosen_(chosen),
        include_("include", options.include),
        exclude_("exclude", options.exclude),
        architecture_(Architecture::find(config_of(checkpoint))) {
    selection_.reader = reader_of(layout, options);
    if (architecture_) selection_.architecture = architecture_->name();
  }

  Selection run() {
    // What reads images or sound is all that some models are.
    reads_only_ = architecture_ && std::ranges::none_of(checkpoint_.weights, [&](const Weight& weight) {
                    const auto module = architecture_->find_tensor(weight.name);
                    return module && weight.shape.size() > 1 && kept_reason(*module).empty();
                  });
    if (selection_.reader == Reader::mlx_lm) {
      const std::optional<MlxModel> model = MlxModel::find(config_of(checkpoint_));
      if (model) return for_mlx(*model);
      if (architecture_)
        selection_.why_not =
            fmt::format("it has no {} that the table of architectures knows", architecture_->name());
    }
    for (size_t i = 0; i < checkpoint_.weights.size(); ++i) select(checkpoint_.weights[i], i);
    refuse_unreadable();
    // Modules that share the weight of others have none in the checkpoint.
    if (architecture_) selection_.skips = architecture_->tied_modules();
    selection_.skips.push_back("lm_head");
    return std::move(selection_);
  }

 private:
  bool by_include() const { return chosen_ != nullptr || !options_.include.empty(); }
  bool is_included(const std::string& name) const {
    return chosen_ != nullptr ? chosen_->contains(name) : include_.matches(name);
  }
  void select(const Weight& weight, size_t index);
  Selection for_mlx(const MlxModel& model);
  const std::string& stored_dtype(const Weight& weight) const {
    return checkpoint_.tensors[static_cast<size_t>(weight.parts.front())].dtype;
  }
  std::string reason_for_mlx(const MlxWeight& own) const;
  std::string reason_by_name(const Weight& weight) const;
  void refuse_unreadable() const;

  const Checkpoint::Impl& checkpoint_;
  const LayoutInfo& layout_;
  const QuantizeOptions& options_;
  const std::set<std::string>* const chosen_;
  const NameFilter include_, exclude_;
  const std::optional<Architecture> architecture_;
  Selection selection_;
  bool reads_only_ = false;
  std::vector<std::string> unreadable_;  // that include selects
  std::string first_reason_;
};

// Why a weight of an unknown architecture stays dense by default.
std::string Selector::reason_by_name(const Weight& weight) const {
  const std::string& name = weight.name;
  if (name.size() > kMaxMatchedName || names_embedding(name) || names_kept(name) ||
      !(name.ends_with(".weight") || weight.shape.size() == 3))
    return "not selected";
  return "";
}

void Selector::select(const Weight& weight, size_t index) {
  const std::string& name = weight.name;
  const size_t rank = weight.shape.size();
  const std::optional<ModuleInfo> module = architecture_ ? architecture_->find_tensor(name) : std::nullopt;
  const bool by_include = this->by_include(), excluded = exclude_.matches(name);
  const bool experts =
      module ? module->kind == ModuleKind::experts : name.find("experts") != std::string::npos;
  std::string reason;
  if (by_include) {
    if (rank < 2 || rank > 3 || !is_included(name)) reason = "not selected";
    HALFBYTE_CHECK(!reason.empty() || is_quantizable(weight.dtype) || excluded, usage,
                   "include selects \"{}\", which is {}: only F32, F16 and BF16 can be quantized",
                   printable(name), stored_dtype(weight));
  } else if (!(rank == 2 || (rank == 3 && experts)) || !is_quantizable(weight.dtype)) {
    reason = module && rank > 1 ? kept_reason(*module, reads_only_) : "";
    const bool is_matrix = module && (rank == 2 || (rank == 3 && experts));
    if (reason.empty()) reason = is_matrix ? "dtype " + stored_dtype(weight) : "not selected";
  } else if (architecture_) {
    reason = module ? kept_reason(*module, reads_only_) : "not in " + selection_.architecture;
  } else {
    reason = reason_by_name(weight);
  }
  if (reason.empty() && excluded) reason = "excluded";
  if (reason.empty() && num_elements(weight) == 0) reason = "empty";
  // Of experts without a module no more is known than the name.
  const bool turned = layout_.turns_experts && rank == 3 && (module ? are_turned(*module) : experts);
  if (reason.empty() && !by_include && layout_.turns_experts && !turned)
    reason = fmt::format("layout {0} holds only experts as {0} has them", layout_.name);

  const Reader reader = selection_.reader;
  const bool apart =
      module && num_elements(weight) > 0 && takes_apart(reader, layout_.layout, weight, *module);
  if (reason.empty() && architecture_ && reader != Reader::none) {
    std::string why = module ? cannot_load(reader, layout_.layout, options_.asymmetric, *module,
                                           rank == 2 || apart, architecture_->tied())
                             : selection_.architecture + " has no such weight";
    if (!why.empty() && by_include && !options_.force_layout) {
      unreadable_.push_back(name);
      if (first_reason_.empty()) first_reason_ = why;
    } else if (!why.empty() && !by_include) {
      reason = why;
    }
  }

  std::vector<OutputWeight> outputs;
  if (apart) {
    outputs = experts_apart(checkpoint_, index, *module);
  } else if (reason.empty() && (turned || (module && module->kind == ModuleKind::conv1d && rank == 2 &&
                                           layout_.turns_conv1d))) {
    outputs = {transposed_weight(checkpoint_, index)};
  } else {
    outputs = {whole_weight(weight, index)};
  }
  std::vector<std::string> skips;
  if (rank >= 2 && (module || !names_embedding(name))) skips = skips_of_weight(name, module);
  for (OutputWeight& output : outputs)
    selection_.weights.push_back({std::move(output), reason.empty(), reason, skips, {}, module});
}

// Why a weight of mlx-lm stays dense.
std::string Selector::reason_for_mlx(const MlxWeight& own) const {
  const auto is_named = [&](const auto& matches) {
    return matches(own.weight.name) || std::ranges::any_of(own.weight.sources, [&](const SourceRows& source) {
             return matches(checkpoint_.weights[source.weight].name);
           });
  };
  const Weight& first = checkpoint_.weights[own.weight.sources.front().weight];
  const bool excluded = is_named([&](const std::string& name) { return exclude_.matches(name); });
  if (by_include()) {
    if (own.weight.shape.size() < 2 || !is_named([&](const std::string& name) { return is_included(name); }))
      return "not selected";
    HALFBYTE_CHECK(is_quantizable(first.dtype) || excluded, usage,
                   "include selects \"{}\", which is {}: only F32, F16 and BF16 can be quantized",
                   printable(own.weight.name), stored_dtype(first));
  } else if (own.kind == MlxWeight::Kind::other) {
    return "not selected";
  } else if (options_.keep_embeddings && (own.head || own.kind == MlxWeight::Kind::embedding)) {
    return own.head ? "head" : "embedding";
  } else if (!own.quantized) {
    return "mlx-lm keeps it dense";
  } else if (!is_quantizable(first.dtype)) {
    return "dtype " + stored_dtype(first);
  } else if (own.weight.cols() % options_.group_size.value_or(layout_.default_group_size) != 0) {
    return "mlx-lm keeps rows dense that are not whole groups";
  }
  return excluded ? "excluded" : num_elements(first) == 0 ? "empty" : "";
}

Selection Selector::for_mlx(const MlxModel& model) {
  HALFBYTE_CHECK(model.refused().empty(), bad_input,
                 "mlx-lm does not load {} as layout mlx has it: {}; --reader none writes it all the same",
                 selection_.architecture.empty() ? "this model" : selection_.architecture, model.refused());
  if (selection_.architecture.empty()) selection_.architecture = "a model of mlx-lm";
  MlxModel::Weights all = model.weights(checkpoint_.weights);
  for (MlxWeight& own : all.weights) {
    const std::string reason = reason_for_mlx(own);
    if (reason.empty() && own.kind == MlxWeight::Kind::other && !options_.force_layout) {
      unreadable_.push_back(own.weight.name);
      if (first_reason_.empty()) first_reason_ = "it is no layer that mlx-lm quantizes";
    }
    selection_.weights.push_back({std::move(own.weight), reason.empty(), reason, {}, own.grid, {}});
  }
  refuse_unreadable();
  selection_.left_out = std::move(all.dropped);
  return std::move(selection_);
}

void Selector::refuse_unreadable() const {
  if (unreadable_.empty()) return;
  HALFBYTE_FAIL(usage,
                "{} {}, which {} cannot load in layout {}: {}; leave {} out, or write what it cannot load "
                "with --force-layout or --layout halfbyte",
                chosen_ != nullptr ? "quantized is" : "include selects", name_list(unreadable_),
                to_string(selection_.reader), layout_.name, first_reason_,
                unreadable_.size() == 1 ? "it" : "them");
}

std::string escaped(const std::string& name) {
  std::string text;
  for (const char c : name) {
    if (c == '.') text += '\\';
    text += c;
  }
  return text;
}
// Of a pattern with a `*` for each number.
std::string with_digits(const std::string& pattern) {
  std::string text;
  for (const char c : pattern) text += c == '*' ? std::string("[0-9]+") : std::string(1, c);
  return text;
}

// transformers matches an entry of bitsandbytes with the beginning of a module's name up to a dot, and with
// the end of it.
std::vector<std::string> spelled_for_bitsandbytes(const std::set<std::string>& skips,
                                                  const std::set<std::string>& quantized) {
  const auto reversed = [](const std::string& text) { return std::string(text.rbegin(), text.rend()); };
  std::set<std::string> endings;  // of the quantized modules, each from its end on
  for (const std::string& module : quantized) endings.insert(reversed(module));
  std::vector<std::string> result;
  for (std::string skip : skips) {
    if (skip.ends_with(kBelow)) skip.pop_back();
    skip = with_digits(skip);
    const std::string ending = reversed(skip);
    const auto module = endings.lower_bound(ending);
    const bool covers_more = module != endings.end() && module->starts_with(ending);
    result.push_back(covers_more ? skip + "$" : skip);
  }
  return result;
}
// An entry of compressed-tensors is a whole name, or a regular expression.
std::vector<std::string> spelled_for_compressed_tensors(const std::set<std::string>& skips) {
  std::vector<std::string> result;
  for (const std::string& skip : skips) {
    const bool below = skip.ends_with(kBelow);
    if (below || skip.find('*') != std::string::npos)
      result.push_back("re:^" + with_digits(escaped(skip)) + (below ? "" : "$"));
    else
      result.push_back(skip);
  }
  return result;
}

// In transformers an entry of awq, fp8 and mxfp4 is a regular expression for the beginning of a module's name
// up to a dot, or an end of it; in vLLM a part of it.
std::vector<std::string> spelled_for_names(const std::set<std::string>& skips) {
  std::vector<std::string> result;
  for (std::string skip : skips) {
    if (skip.ends_with(kBelow)) skip.pop_back();
    result.push_back(with_digits(skip));
  }
  return result;
}

}  // namespace

std::string name_list(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i)
    text += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", printable(names[i]));
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

Reader reader_of(const LayoutInfo& layout, const QuantizeOptions& options) {
  const std::vector<Reader> readers = readers_of(layout.layout);
  if (!options.reader) return readers.empty() ? Reader::none : readers.front();
  HALFBYTE_CHECK(
      *options.reader == Reader::none || std::ranges::find(readers, *options.reader) != readers.end(), usage,
      "reader {} does not read layout {}", to_string(*options.reader), layout.name);
  const std::string why_not = cannot_read(*options.reader, layout.layout, options);
  HALFBYTE_CHECK(why_not.empty() || options.force_layout, usage,
                 "{}; choose another --reader, or write it all the same "
                 "with --force-layout",
                 why_not);
  return *options.reader;
}

Selection select_weights(const Checkpoint::Impl& checkpoint, const LayoutInfo& layout,
                         const QuantizeOptions& options, const std::set<std::string>* chosen) {
  return Selector(checkpoint, layout, options, chosen).run();
}

std::vector<std::string> skips_of(const Selection& selection, const LayoutInfo& layout,
                                  const std::vector<bool>& is_dense) {
  std::set<std::string> skips(selection.skips.begin(), selection.skips.end()), quantized;
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    const SelectedWeight& weight = selection.weights[i];
    (is_dense[i] ? skips : quantized).insert(weight.skips.begin(), weight.skips.end());
  }
  // Of experts some of which are quantized, the others one by one.
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    const SelectedWeight& weight = selection.weights[i];
    if (is_dense[i] && std::ranges::any_of(weight.skips, [&](const std::string& skip) {
          return skip.ends_with(kBelow) && quantized.contains(skip);
        }))
      skips.insert(without_suffix(weight.weight.name, ".weight"));
  }
  for (const std::string& name : quantized) skips.erase(name);
  switch (layout.layout) {
    case Layout::bitsandbytes:
      return spelled_for_bitsandbytes(skips, quantized);
    case Layout::awq:
    case Layout::fp8:
    case Layout::gpt_oss:
      return spelled_for_names(skips);
    default:
      return spelled_for_compressed_tensors(skips);
  }
}

void check_experts(const Selection& selection, const LayoutInfo& layout, const std::vector<bool>& is_dense) {
  // What makes one tensor of them takes no dense ones where the model is of compressed-tensors.
  if (layout.layout != Layout::compressed_tensors || selection.reader != Reader::transformers_5) return;
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    const SelectedWeight& weight = selection.weights[i];
    const bool is_merged = weight.module && weight.module->kind == ModuleKind::experts &&
                           weight.weight.shape.size() == 2 && !weight.module->operations.empty();
    HALFBYTE_CHECK(
        !is_merged || !is_dense[i], usage,
        "transformers-5 loads experts of layout {} only if all are quantized, but \"{}\" stays dense{}; "
        "quantize them all, or choose --reader transformers-4, --reader vllm or another layout",
        layout.name, printable(weight.weight.name),
        weight.reason.empty() ? "" : fmt::format(" ({})", weight.reason));
  }
}

bool must_be_decompressed(const Selection& selection, bool asymmetric, const std::vector<bool>& is_dense) {
  if (asymmetric) return true;
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    const std::optional<ModuleInfo>& module = selection.weights[i].module;
    if (is_dense[i] || !module) continue;
    // Of other roles the table does not say it.
    const bool is_known = module->role == ModuleRole::plain || module->role == ModuleRole::expert;
    if (module->uncompressed || !is_known) return true;
  }
  return false;
}

QuantizedModules quantized_modules(const Selection& selection, const std::vector<bool>& is_dense) {
  QuantizedModules modules;
  std::set<std::string> names, lists;
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    const SelectedWeight& weight = selection.weights[i];
    if (is_dense[i]) continue;
    const std::string own = module_of(weight.weight.name);
    const std::string module = weight.module && weight.weight.shape.size() == 2 ? weight.module->module : own;
    names.insert({own, module});
    lists.insert(list_of_layers(module));
    modules.head |= weight.module ? weight.module->role == ModuleRole::head : own == "lm_head";
  }
  if (lists.size() == 1) modules.blocks = *lists.begin();
  for (size_t i = 0; i < selection.weights.size(); ++i)
    if (is_dense[i] && std::ranges::any_of(selection.weights[i].skips, [&](const std::string& skip) {
          return skip.starts_with(modules.blocks) && !list_of_layers(skip).empty();
        })) {
      modules.names.assign(names.begin(), names.end());
      break;
    }
  return modules;
}

ModelQuantization model_quantization(const Selection& selection, const LayoutInfo& layout, bool force_layout,
                                     std::span<const QuantizedWeight* const> targets) {
  ModelQuantization quantization{
      .layout = layout.layout, .spec = {}, .weight_dtype = DType::bf16, .dense_modules = {}, .modules = {}};
  std::map<DType, int64_t> elements;  // of the quantized weights, by dtype
  std::vector<bool> is_dense;
  const QuantizedWeight* first = nullptr;  // that has no grid of its own
  bool asymmetric = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    const QuantizedWeight* const target = targets[i];
    is_dense.push_back(target == nullptr);
    if (target == nullptr) continue;
    const QuantSpec& spec = target->spec;
    elements[target->dtype] += num_elements(target->shape);
    asymmetric |= spec.asymmetric;
    const bool own_grid = layout.layout == Layout::mlx && first != nullptr &&
                          (spec.format != first->spec.format || spec.group_size != first->spec.group_size);
    if (selection.weights[i].grid || own_grid) {
      quantization.modules[module_of(target->name)] = {info(spec.format).bits, spec.group_size};
      continue;
    }
    if (first == nullptr) first = target;
    QuantSpec as_first = spec;
    as_first.scale_dtype = first->spec.scale_dtype;  // no config says it
    HALFBYTE_CHECK(layout.many_specs || as_first == first->spec, usage,
                   "layout {} has one spec for all weights of a model, but \"{}\" has another than \"{}\"",
                   layout.name, printable(target->name), printable(first->name));
  }
  if (first != nullptr) quantization.spec = first->spec;
  if (!force_layout) check_experts(selection, layout, is_dense);
  quantization.weight_dtype =
      std::ranges::max_element(elements, {}, [](const auto& entry) { return entry.second; })->first;
  quantization.dense_modules = skips_of(selection, layout, is_dense);
  quantization.decompressed = must_be_decompressed(selection, asymmetric, is_dense);
  const QuantizedModules modules = quantized_modules(selection, is_dense);
  quantization.quantized_modules = modules.names;
  quantization.blocks = modules.blocks;
  quantization.head = modules.head;
  return quantization;
}

std::vector<ReaderVerdict> reader_verdicts(const Selection& selection, const LayoutInfo& layout,
                                           const QuantizeOptions& options,
                                           const std::vector<bool>& is_dense) {
  std::vector<ReaderVerdict> verdicts;
  for (const Reader reader : readers_of(layout.layout)) {
    ReaderVerdict& verdict = verdicts.emplace_back(ReaderVerdict{reader, selection.why_not});
    if (verdict.why_not.empty()) verdict.why_not = cannot_read(reader, layout.layout, options);
    for (size_t i = 0; i < selection.weights.size() && verdict.why_not.empty(); ++i) {
      const SelectedWeight& weight = selection.weights[i];
      if (is_dense[i] || !weight.module) continue;
      verdict.why_not = cannot_load(reader, layout.layout, options.asymmetric, *weight.module,
                                    weight.weight.shape.size() == 2, false);
      if (!verdict.why_not.empty())
        verdict.why_not = fmt::format("of {}: {}", printable(weight.weight.name), verdict.why_not);
    }
    if (verdict.why_not.empty() && layout.layout == Layout::gptq && reader != Reader::vllm &&
        quantized_modules(selection, is_dense).blocks.empty())
      verdict.why_not = fmt::format("{} reads gptq in one list of layers only", to_string(reader));
  }
  return verdicts;
}

}  // namespace io

std::vector<std::string> dense_reasons(const std::string& config, std::span<const Weight> weights,
                                       const QuantizeOptions& options) {
  Checkpoint::Impl model;  // without files
  model.config = config;
  for (const Weight& weight : weights) {
    StoredTensor& tensor = model.tensors.emplace_back();
    tensor.name = weight.name;
    tensor.dtype = weight.dtype ? to_string(*weight.dtype) : "of another dtype";
    model.weights.push_back(weight);
    model.weights.back().parts = {static_cast<int>(model.tensors.size()) - 1};
  }
  QuantizeOptions of_names;
  of_names.layout = Layout::halfbyte;
  of_names.include = options.include;
  of_names.exclude = options.exclude;
  std::vector<std::string> reasons;
  for (const io::SelectedWeight& weight :
       io::select_weights(model, io::layout_info(Layout::halfbyte), of_names).weights)
    reasons.push_back(weight.reason);
  return reasons;
}

}  // namespace halfbyte
