#include "io/architecture.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "core/checks.h"
#include "io/json.h"
#include "io/name_patterns.h"

namespace halfbyte::io {
namespace {

using names::components;
using names::expand;
using names::matches;
using names::Parts;
using names::patterns;
using names::renamed;
using names::Rule;
using names::split;
using names::with_numbers;
using nlohmann::json;

struct Table {
  struct Class {
    std::string model_type;
    const json* entry;
  };
  json text;
  std::map<std::string, Class, std::less<>> classes;
  std::map<std::string, std::string, std::less<>> base;  // of a model type

  Table() : text(parse_json<json>(architectures_json(), "architectures.json")) {
    // The first class of a model type is its base model, and the file's order is not that of `json`.
    const auto ordered = parse_json<nlohmann::ordered_json>(architectures_json(), "architectures.json");
    for (const auto& [model_type, some] : ordered.at("types").items()) {
      base.emplace(model_type, some.begin().key());
    }
    for (const auto& [model_type, some] : text.at("types").items()) {
      for (const auto& [name, entry] : some.items()) classes.insert({name, {model_type, &entry}});
    }
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
};

const Table& table() {
  static const Table& result = *new Table;
  return result;
}

// The entry of a class: its own, or that of the class that it is like.
const json& entry_of(const std::string& name) {
  const json& entry = *table().classes.at(name).entry;
  return entry.is_string() ? entry_of(entry.get<std::string>()) : entry;
}

// What a class has under a key: its own, or that of the class that it refers to; or null.
const json& value_of(const std::string& name, const char* key) {
  static const json& none = *new json;
  const json& entry = entry_of(name);
  const auto found = entry.find(key);
  if (found == entry.end()) return none;
  if (found->is_string() && found->get_ref<const std::string&>().starts_with('=')) {
    return value_of(found->get<std::string>().substr(1), key);
  }
  return *found;
}

// The configuration within another, by its keys; null if there is none.
const json& inner_config(const json& config, std::string_view keys) {
  static const json& none = *new json;
  const json* at = &config;
  for (const std::string& key : split(keys, '.')) {
    const auto found = at->is_object() ? at->find(key) : at->end();
    if (!at->is_object() || found == at->end()) return none;
    at = &*found;
  }
  return *at;
}

std::string text_of(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// The class that stands for `usual` in a model whose configuration says another model type: that with the
// same head.
std::string class_like(const std::string& usual, const json& config) {
  const Table& all = table();
  const std::string model_type = text_of(config, "model_type");
  const auto base = all.base.find(model_type);
  if (base == all.base.end() || all.classes.at(usual).model_type == model_type) return usual;
  const size_t head = usual.find("For");
  if (head == std::string::npos) return base->second;
  for (const auto& [name, one] : all.classes) {
    if (one.model_type != model_type) continue;
    if (name.ends_with(usual.substr(head)) ||
        (usual.ends_with("ForCausalLM") && name.ends_with("LMHeadModel")))
      return name;
  }
  return base->second;
}

ModuleKind kind_of(std::string_view word) {
  if (word == "linear") return ModuleKind::linear;
  if (word == "linear-subclass") return ModuleKind::linear_subclass;
  if (word == "conv1d") return ModuleKind::conv1d;
  if (word == "embedding") return ModuleKind::embedding;
  if (word == "attention") return ModuleKind::attention;
  if (word == "convolution") return ModuleKind::convolution;
  if (word == "parameter") return ModuleKind::parameter;
  HALFBYTE_CHECK(word.starts_with("experts"), bug, "architectures.json: no kind {}", word);
  return ModuleKind::experts;
}

ModuleRole role_of(std::string_view word) {
  if (word.empty()) return ModuleRole::plain;
  if (word == "head") return ModuleRole::head;
  if (word == "router") return ModuleRole::router;
  if (word == "expert") return ModuleRole::expert;
  if (word == "projector") return ModuleRole::projector;
  HALFBYTE_CHECK(word == "adapter", bug, "architectures.json: no role {}", word);
  return ModuleRole::adapter;
}

// The keys of an entry that are no kinds of modules.
bool is_kind(const std::string& key) {
  static constexpr std::array<std::string_view, 13> kOthers = {
      "apart", "f32",   "f32-from-f16", "fused", "ignored", "may-be",      "models",
      "names", "reads", "skipped",      "tie",   "tied",    "uncompressed"};
  return !std::ranges::binary_search(kOthers, key);
}

}  // namespace

const json& architectures() { return table().text; }

struct Architecture::Model {
  struct Group {
    ModuleKind kind;
    ModuleRole role;
    bool transposed, interleaved;
    std::vector<Parts> patterns;
  };
  struct Nested {
    Parts path;
    std::vector<std::shared_ptr<const Model>> models;  // one of these
  };
  struct Fused {
    std::vector<Parts> targets, sources;
    std::string operations;
  };

  std::string name;
  bool tied = false;
  ModuleRole reads = ModuleRole::plain;  // vision or audio
  std::vector<Group> groups;
  std::vector<Nested> nested;
  std::vector<Fused> fused;
  std::vector<Rule> rules, may_be;
  std::vector<Parts> tied_modules, apart, uncompressed;
  std::string tied_to;
  Parts f32;

  static std::shared_ptr<const Model> make(const std::string& name, const json& config);
  std::optional<ModuleInfo> find(std::string_view tensor) const;
  std::optional<ModuleInfo> find_module(const Parts& parts) const;
  std::vector<std::string> tied_names() const;
};

std::shared_ptr<const Architecture::Model> Architecture::Model::make(const std::string& name,
                                                                     const json& config) {
  auto model = std::make_shared<Model>();
  model->name = name;
  for (const auto& [key, own] : entry_of(name).items()) {
    const json& value = value_of(name, key.c_str());
    if (is_kind(key)) {
      const Parts words = split(key, '/');
      model->groups.push_back({kind_of(words[0]), role_of(words.size() > 1 ? words[1] : ""),
                               words[0].find("transposed") != std::string::npos,
                               words[0].find("interleaved") != std::string::npos,
                               patterns(value.get_ref<const std::string&>())});
    } else if (key == "models") {
      for (const auto& [path, what] : value.items()) {
        const auto text = what.get<std::string>();
        const size_t colon = text.find(':');
        const json& inner = colon == std::string::npos ? config : inner_config(config, text.substr(0, colon));
        Nested nested{split(path, '.'), {}};
        for (const std::string& one :
             split(colon == std::string::npos ? text : text.substr(colon + 1), '|')) {
          const std::string usual = one == "@" ? table().base.at(table().classes.at(name).model_type) : one;
          nested.models.push_back(make(colon == std::string::npos ? usual : class_like(usual, inner), inner));
        }
        model->nested.push_back(std::move(nested));
      }
    } else if (key == "names" || key == "may-be") {
      for (const auto& [source, target] : value.items()) {
        (key == "names" ? model->rules : model->may_be)
            .push_back({components(source), components(target.get_ref<const std::string&>())});
      }
    } else if (key == "fused") {
      for (const auto& [target, how] : value.items()) {
        const auto text = how.get<std::string>();
        const size_t colon = text.find(": ");
        Fused fused{patterns(target), {}, text.substr(0, colon)};
        for (const std::string& one : split(text.substr(colon + 2), ' ')) {
          for (Parts& pattern : patterns(one)) fused.sources.push_back(std::move(pattern));
        }
        model->fused.push_back(std::move(fused));
      }
    } else if (key == "tied") {
      const Parts sides = split(value.get_ref<const std::string&>(), '=');
      model->tied_modules = patterns(sides.at(0));
      model->tied_to = expand(sides.at(1)).front();
    } else if (key == "apart") {
      model->apart = patterns(value.get_ref<const std::string&>());
    } else if (key == "uncompressed") {
      model->uncompressed = patterns(value.get_ref<const std::string&>());
    } else if (key == "f32" || key == "f32-from-f16") {
      for (std::string& one : split(value.get_ref<const std::string&>(), ' '))
        model->f32.push_back(std::move(one));
    } else if (key == "tie") {
      model->tied = true;
    } else if (key == "reads") {
      model->reads = value == "audio"    ? ModuleRole::audio
                     : value == "vision" ? ModuleRole::vision
                                         : ModuleRole::projector;
    }
  }
  if (config.is_object() && config.contains("tie_word_embeddings") &&
      config["tie_word_embeddings"].is_boolean()) {
    model->tied = config["tie_word_embeddings"].get<bool>();
  }
  return model;
}

// The module with a tensor of this name in the model.
std::optional<ModuleInfo> Architecture::Model::find_module(const Parts& parts) const {
  const size_t size = parts.size();
  for (const Group& group : groups) {
    // Experts and parameters are tensors, and so are the parts that weight normalisation makes of a
    // convolution's.
    const bool whole = group.kind == ModuleKind::experts || group.kind == ModuleKind::parameter;
    const bool own =
        group.kind == ModuleKind::attention || parts.back() == "weight" || parts.back() == "bias";
    const size_t length = whole ? size : size - 1;
    for (const Parts& pattern : group.patterns) {
      const bool inside = group.kind == ModuleKind::attention && size >= 2 && parts[size - 2] == "out_proj" &&
                          matches(pattern, parts, 0, size - 2);
      const bool part = group.kind == ModuleKind::convolution && matches(pattern, parts, 0, size);
      if (!inside && !part && !((whole || own) && matches(pattern, parts, 0, length))) continue;
      ModuleInfo info{};
      info.kind = group.kind;
      info.role = group.role;
      info.transposed = group.transposed;
      info.interleaved = group.interleaved;
      info.module = names::join(parts, 0, length);
      const auto lies_in = [&](const Parts& one) {
        return one.size() <= size && matches(one, parts, 0, one.size());
      };
      info.apart = std::ranges::any_of(apart, lies_in);
      info.uncompressed = std::ranges::any_of(uncompressed, lies_in);
      // As transformers compares them: the beginning or the end of a name.
      info.kept_f32 = std::ranges::any_of(f32, [&](const std::string& word) {
        return info.module.ends_with(word) || info.module.starts_with(word + ".");
      });
      for (const Parts& one : tied_modules) {
        if (matches(one, parts, 0, length)) info.tied_to = tied_to;
      }
      return info;
    }
  }
  return std::nullopt;
}

std::optional<ModuleInfo> Architecture::Model::find(std::string_view tensor) const {
  // The names that it may have in the model: by the rules, as it is, and these with a prefix more or less.
  std::vector<std::pair<std::string, std::string>> names;  // with operations
  const Parts given = split(tensor, '.');
  for (const Fused& one : fused) {
    for (const Parts& source : one.sources) {
      if (!matches(source, given, 0, given.size())) continue;
      const Parts target = with_numbers(source, one.targets.front(), given, 0);
      names.emplace_back(names::join(target, 0, target.size()), one.operations);
    }
  }
  const size_t plain = names.size();
  names.emplace_back(renamed(rules, tensor), "");
  names.emplace_back(tensor, "");
  for (const Rule& rule : may_be) {
    for (size_t i = plain; i < plain + 2; ++i) {
      const Parts parts = split(names[i].first, '.');
      if (parts.size() <= rule.source.size() || !matches(rule.source, parts, 0, rule.source.size())) continue;
      Parts other = rule.target;
      other.insert(other.end(), parts.begin() + static_cast<ptrdiff_t>(rule.source.size()), parts.end());
      names.emplace_back(names::join(other, 0, other.size()), "");
    }
  }
  for (const auto& [name, operations] : names) {
    const Parts parts = split(name, '.');
    std::optional<ModuleInfo> info;
    const Nested* inside = nullptr;
    for (const Nested& one : nested) {
      const size_t size = one.path.size();
      if (size < parts.size() && matches(one.path, parts, 0, size) &&
          (inside == nullptr || size > inside->path.size())) {
        inside = &one;
      }
    }
    if (inside == nullptr) {
      info = find_module(parts);
    } else {
      const std::string prefix = names::join(parts, 0, inside->path.size()) + ".";
      for (const auto& model : inside->models) {
        info = model->find(name.substr(prefix.size()));
        if (!info) continue;
        info->module.insert(0, prefix);
        if (!info->tied_to.empty()) info->tied_to.insert(0, prefix);
        break;
      }
    }
    if (!info) continue;
    if (!operations.empty()) info->operations = operations;
    if (info->role == ModuleRole::plain) info->role = reads;
    return info;
  }
  return std::nullopt;
}

Architecture::Architecture(std::shared_ptr<const Model> model) : model_(std::move(model)) {}

std::optional<Architecture> Architecture::find(const json& config) {
  const Table& all = table();
  if (!config.is_object()) return std::nullopt;
  if (const auto names = config.find("architectures"); names != config.end() && names->is_array()) {
    for (const json& name : *names) {
      if (name.is_string() && all.classes.contains(name.get_ref<const std::string&>())) {
        return Architecture(Model::make(name.get<std::string>(), config));
      }
    }
  }
  const std::string model_type = text_of(config, "model_type");
  const auto base = all.base.find(model_type);
  if (base == all.base.end()) return std::nullopt;
  // With a head, which a checkpoint may have.
  for (const char* head : {"ForCausalLM", "LMHeadModel", "ForConditionalGeneration"}) {
    for (const auto& [name, one] : all.classes)
      if (one.model_type == model_type && name.ends_with(head))
        return Architecture(Model::make(name, config));
  }
  return Architecture(Model::make(base->second, config));
}

std::vector<std::string> Architecture::Model::tied_names() const {
  std::vector<std::string> names;
  for (const Parts& one : tied_modules) names.push_back(names::join(one, 0, one.size()));
  for (const Nested& one : nested)
    for (const auto& model : one.models)
      for (const std::string& name : model->tied_names())
        names.push_back(names::join(one.path, 0, one.path.size()) + "." + name);
  return names;
}

const std::string& Architecture::name() const { return model_->name; }

bool Architecture::tied() const { return model_->tied; }

std::vector<std::string> Architecture::tied_modules() const { return model_->tied_names(); }

std::optional<ModuleInfo> Architecture::find_tensor(std::string_view tensor) const {
  if (auto info = model_->find(tensor)) return info;
  // Checkpoints of a base model have no prefix for it, and those of a model with a head may be read as the
  // base model.
  for (const Model::Nested& one : model_->nested) {
    if (auto info = model_->find(names::join(one.path, 0, one.path.size()) + "." + std::string(tensor)))
      return info;
  }
  const size_t dot = tensor.find('.');
  return dot == std::string_view::npos ? std::nullopt : model_->find(tensor.substr(dot + 1));
}

}  // namespace halfbyte::io
