#include "io/mlx_model.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string_view>
#include <utility>

#include "core/checks.h"
#include "io/architecture.h"
#include "io/file.h"
#include "io/name_patterns.h"

namespace halfbyte::io {
namespace {

using names::matches;
using names::Parts;
using names::patterns;
using names::Rule;
using names::split;
using nlohmann::json;

const json* member(const json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() ? &*found : nullptr;
}

int64_t integer(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  HALFBYTE_CHECK(error == std::errc{} && end == text.data() + text.size(), bug, "\"{}\" is no number", text);
  return value;
}

// Elements of a dense weight, as an array of any strides.
struct View {
  size_t weight;
  int64_t first = 0;
  std::vector<int64_t> shape, strides;

  View(size_t index, std::vector<int64_t> dims)
      : weight(index), shape(std::move(dims)), strides(shape.size(), 1) {
    for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
  }
  void swap_last_axes() {
    const size_t rank = shape.size();
    std::swap(shape[rank - 2], shape[rank - 1]);
    std::swap(strides[rank - 2], strides[rank - 1]);
  }
  void take(size_t axis, int64_t begin, int64_t end) {
    first += begin * strides[axis];
    shape[axis] = end - begin;
  }
};

// Its elements, row by row of the matrix with as many columns as the last axis has.
void add_rows(const View& view, std::vector<SourceRows>& sources) {
  const bool scalar = view.shape.empty();
  const int64_t cols = scalar ? 1 : view.shape.back();
  // The axes before the last, as few as their strides allow.
  std::vector<int64_t> sizes, strides;
  int64_t num_rows = 1;
  for (size_t axis = 0; axis + 1 < view.shape.size(); ++axis) {
    const int64_t size = view.shape[axis], stride = view.strides[axis];
    num_rows *= size;
    if (size == 1) continue;
    if (!sizes.empty() && strides.back() == size * stride) {
      sizes.back() *= size;
      strides.back() = stride;
    } else {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  }
  SourceRows rows{view.weight, view.first, num_rows, cols, cols == 1 ? 1 : view.strides.back()};
  if (num_rows == 0 || cols == 0) {
    rows.num_rows = 0;
  } else if (!sizes.empty()) {
    rows.num_rows = sizes.back();
    rows.row_stride = strides.back();
  }
  if (sizes.size() < 2 || rows.num_rows == 0) {
    sources.push_back(rows);
    return;
  }
  std::vector<int64_t> at(sizes.size() - 1);
  for (;;) {
    rows.first = std::inner_product(at.begin(), at.end(), strides.begin(), view.first);
    sources.push_back(rows);
    size_t axis = at.size();
    while (axis > 0 && ++at[axis - 1] == sizes[axis - 1]) at[--axis] = 0;
    if (axis == 0) return;
  }
}

// One of the ways in which a tensor of mlx-lm is made of others.
struct Recipe {
  Parts target, source;
  bool stack = false;                   // of those of all experts; otherwise it has one source
  std::vector<std::string> operations;  // in their order
};

struct Listed {
  Parts module;
  MlxWeight::Kind kind;
  bool quantized;
  std::optional<MlxGrid> grid;
};

// "linear bits=8 group_size=64", "experts dense"
Listed listed_of(const std::string& key) {
  static const auto& kinds =
      *new std::map<std::string, MlxWeight::Kind, std::less<>>{{"linear", MlxWeight::Kind::linear},
                                                               {"embedding", MlxWeight::Kind::embedding},
                                                               {"experts", MlxWeight::Kind::experts},
                                                               {"MultiLinear", MlxWeight::Kind::heads}};
  const Parts words = split(key, ' ');
  const auto kind = kinds.find(words.front());
  HALFBYTE_CHECK(kind != kinds.end(), bug, "architectures.json: no kind {} of mlx-lm", key);
  Listed listed{{}, kind->second, true, {}};
  for (size_t i = 1; i < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == "dense") {
      listed.quantized = false;
      continue;
    }
    if (!listed.grid) listed.grid.emplace();
    const size_t equal = word.find('=');
    const std::string_view name = word.substr(0, equal);
    const int64_t value = integer(word.substr(equal + 1));
    HALFBYTE_CHECK(name == "bits" || name == "group_size", bug, "architectures.json: no parameter {}", word);
    if (name == "bits")
      listed.grid->bits = static_cast<int>(value);
    else
      listed.grid->group_size = value;
  }
  return listed;
}

// That of a model type, or of one that has a certain value too: "granitemoehybrid num_local_experts=0".
const json* entry_of(const json& config, const std::string& model_type) {
  const json* result = nullptr;
  for (const auto& [key, entry] : architectures().at("mlx").items()) {
    if (key == model_type && result == nullptr) result = &entry;
    if (!key.starts_with(model_type + " ")) continue;
    const Parts condition = split(std::string_view(key).substr(model_type.size() + 1), '=');
    const json* value = member(config, condition.at(0).c_str());
    if (value != nullptr && value->is_number_integer() && value->get<int64_t>() == integer(condition.at(1)))
      result = &entry;
  }
  return result;
}

// What published checkpoints have beside the table's tensors, and no model of mlx-lm loads: precomputed
// rotations and masks of attention, and layers that predict several tokens.
bool is_left_out(const Parts& name, const Weight& weight) {
  const std::string_view last = name.back();
  const std::string_view owner = name.size() > 1 ? std::string_view(name[name.size() - 2]) : "";
  return last == "inv_freq" || last == "masked_bias" ||
         (last == "bias" && (owner == "attn" || owner == "attention") && weight.shape.size() > 1) ||
         std::find(name.begin(), name.end(), "mtp") != name.end();
}

}  // namespace

struct MlxModel::Model {
  std::string model_type, refused;
  std::map<std::string, int64_t, std::less<>> sizes;  // the integers of the text model's configuration
  std::vector<Listed> listed;
  std::vector<Recipe> recipes;
  std::vector<Rule> rules;
  std::vector<Parts> dropped;     // beginnings of names in the checkpoint
  std::vector<Parts> tied;        // modules that there are not
  std::string own_head;           // a head that is there although it is the embedding; or empty
  std::optional<int64_t> layers;  // the model has no more

  const Listed* find_module(const Parts& tensor) const;
  const Listed* find(const Parts& weight) const;
  bool is_saved_by_mlx(std::span<const Weight> input) const;
  bool is_dropped(const Parts& source, const Parts& target, const Weight& weight) const;
  MlxWeight make(const std::string& target, const Recipe& recipe,
                 const std::vector<std::pair<int64_t, size_t>>& sources, std::span<const Weight> input) const;
  bool is_turned(const View& experts, const std::string& target) const;
  void apply(const std::string& operation, View& view, const std::string& target) const;
  MlxWeight classified(OutputWeight weight) const;
};

// That of a tensor, if mlx-lm quantizes its weight in some case.
const Listed* MlxModel::Model::find_module(const Parts& tensor) const {
  const auto found = std::find_if(listed.begin(), listed.end(), [&](const Listed& one) {
    return matches(one.module, tensor, 0, tensor.size() - 1);
  });
  return found == listed.end() ? nullptr : &*found;
}

const Listed* MlxModel::Model::find(const Parts& weight) const {
  return weight.back() == "weight" ? find_module(weight) : nullptr;
}

// Whether the names are those of mlx-lm already, which dense models of its own have.
bool MlxModel::Model::is_saved_by_mlx(std::span<const Weight> input) const {
  return std::any_of(input.begin(), input.end(), [&](const Weight& weight) {
    const Parts name = split(weight.name, '.');
    const auto is_source = [&](const Recipe& one) { return matches(one.source, name, 0, name.size()); };
    const auto is_target = [&](const Recipe& one) { return matches(one.target, name, 0, name.size()); };
    if (std::any_of(recipes.begin(), recipes.end(), is_source)) return false;
    if (std::any_of(recipes.begin(), recipes.end(), is_target)) return true;
    return find(name) != nullptr && names::renamed(rules, weight.name) != weight.name;
  });
}

bool MlxModel::Model::is_dropped(const Parts& source, const Parts& target, const Weight& weight) const {
  const auto begins = [&](const Parts& one) {
    return one.size() <= source.size() && matches(one, source, 0, one.size());
  };
  if (std::any_of(dropped.begin(), dropped.end(), begins)) return true;
  const auto is_module = [&](const Parts& one) { return matches(one, target, 0, target.size() - 1); };
  if (std::any_of(tied.begin(), tied.end(), is_module)) return true;
  const Listed* module = find_module(target);
  if (module == nullptr && target.size() > 1 && target[target.size() - 2] == "lm_head") return true;
  bool beyond = false;  // layers that predict several tokens have the numbers after the last
  for (size_t i = 0; layers && i + 1 < target.size(); ++i) {
    const std::string& number = target[i + 1];
    beyond =
        beyond || (target[i] == "layers" && number.size() <= 9 && !number.empty() &&
                   number.find_first_not_of("0123456789") == std::string::npos && integer(number) >= *layers);
  }
  return beyond || (module == nullptr && is_left_out(source, weight));
}

// Whether experts that are stored as [E, in, out] in published checkpoints are [E, out, in], as transformers
// 5 has them and may save them: the shape tells.
bool MlxModel::Model::is_turned(const View& experts, const std::string& target) const {
  const Listed* module = find(split(target, '.'));
  const auto hidden = sizes.find("hidden_size");
  if (module == nullptr || module->kind != MlxWeight::Kind::experts || experts.shape.size() != 3 ||
      hidden == sizes.end()) {
    return false;
  }
  const int64_t size = hidden->second;
  const size_t in = target.ends_with("down_proj.weight") ? 2 : 1;
  return experts.shape[in] != size && experts.shape[3 - in] == size;
}

void MlxModel::Model::apply(const std::string& operation, View& view, const std::string& target) const {
  const auto check = [&](bool fits) {
    HALFBYTE_CHECK(fits, bad_input, "tensor \"{}\" of mlx-lm cannot be made: \"{}\" of shape [{}]",
                   printable(target), operation, fmt::join(view.shape, ", "));
  };
  const auto length = [&](const char* key) {
    const auto value = sizes.find(key);
    HALFBYTE_CHECK(value != sizes.end() && value->second > 0, bad_input, "config.json: {} needs \"{}\"",
                   model_type, key);
    return value->second;
  };
  const Parts words = split(operation, ' ');
  if (operation == "copy") return;
  if (operation == "reshape") {  // a single element
    check(std::all_of(view.shape.begin(), view.shape.end(), [](int64_t size) { return size == 1; }));
    view.shape.clear();
    view.strides.clear();
  } else if (operation == "transpose") {
    check(view.shape.size() >= 2);
    view.swap_last_axes();
  } else if (words[0] == "part") {  // "1/2 of 1"
    const Parts which = split(words.at(1), '/');
    const auto axis = static_cast<size_t>(integer(words.at(3)));
    const int64_t number = integer(which.at(0)) - 1, parts = integer(which.at(1));
    check(axis < view.shape.size() && view.shape[axis] % parts == 0);
    const int64_t size = view.shape[axis] / parts;
    view.take(axis, number * size, (number + 1) * size);
  } else if (words[0] == "every") {  // "2 from 0 of 1"
    const int64_t step = integer(words.at(1)), from = integer(words.at(3));
    const auto axis = static_cast<size_t>(integer(words.at(5)));
    check(axis < view.shape.size() && view.shape[axis] % step == 0);
    const int64_t size = view.shape[axis] / step;
    view.take(axis, from, from + size);
    view.strides[axis] *= step;
  } else if (operation == "keys of heads" || operation == "values of heads") {
    const int64_t heads = length("num_attention_heads"), keys = length("qk_nope_head_dim"),
                  values = length("v_head_dim");
    check(view.shape.size() == 2 && view.shape[0] % heads == 0 && view.shape[0] / heads == keys + values);
    view.shape = {heads, keys + values, view.shape[1]};
    view.strides = {(keys + values) * view.strides[0], view.strides[0], view.strides[1]};
    if (words[0] == "keys")
      view.take(1, 0, keys);
    else
      view.take(1, keys, keys + values);
  } else {
    HALFBYTE_FAIL(bug, "architectures.json: no operation \"{}\"", operation);
  }
}

MlxWeight MlxModel::Model::classified(OutputWeight weight) const {
  const Parts name = split(weight.name, '.');
  MlxWeight result{std::move(weight), MlxWeight::Kind::other, false, false, {}};
  if (const Listed* module = find(name)) {
    const std::string& last = name[name.size() - 2];
    result.kind = module->kind;
    result.quantized = module->quantized;
    result.head = last == "lm_head" || last == "embed_out";
    result.grid = module->grid;
  }
  return result;
}

MlxWeight MlxModel::Model::make(const std::string& target, const Recipe& recipe,
                                const std::vector<std::pair<int64_t, size_t>>& sources,
                                std::span<const Weight> input) const {
  OutputWeight output{target, {}, {}};
  for (size_t i = 0; i < sources.size(); ++i) {
    const Weight& weight = input[sources[i].second];
    HALFBYTE_CHECK(!weight.layout, bad_input,
                   "tensor \"{}\" of mlx-lm cannot be made of \"{}\": it is quantized", printable(target),
                   printable(weight.name));
    HALFBYTE_CHECK(!recipe.stack || sources[i].first == static_cast<int64_t>(i), bad_input,
                   "tensor \"{}\" of mlx-lm cannot be made: that of expert {} is missing or there twice",
                   printable(target), i);
    View view(sources[i].second, weight.shape);
    // The kernels of a convolution keep their name: mlx-lm goes by their shape too.
    const bool is_done =
        recipe.source == recipe.target && weight.shape.size() == 3 && weight.shape.back() == 1;
    if (!is_done) {
      for (const std::string& operation : recipe.operations) {
        if (operation == "plus 1")
          output.plus = 1;
        else if (operation != "transpose" || !is_turned(view, target))
          apply(operation, view, target);
      }
    }
    HALFBYTE_CHECK(i == 0 || view.shape == output.shape, bad_input, "\"{}\" has shape [{}], others [{}]",
                   printable(weight.name), fmt::join(view.shape, ", "), fmt::join(output.shape, ", "));
    output.shape = view.shape;
    add_rows(view, output.sources);
  }
  if (recipe.stack) output.shape.insert(output.shape.begin(), static_cast<int64_t>(sources.size()));
  return classified(std::move(output));
}

MlxModel::MlxModel(std::shared_ptr<const Model> model) : model_(std::move(model)) {}

std::optional<MlxModel> MlxModel::find(const json& config) {
  const json* model_type = member(config, "model_type");
  if (model_type == nullptr || !model_type->is_string()) return std::nullopt;
  const json* entry = entry_of(config, model_type->get_ref<const std::string&>());
  if (entry == nullptr) return std::nullopt;
  auto model = std::make_shared<Model>();
  model->model_type = model_type->get<std::string>();
  const json* text = member(config, "text_config");
  const json& own_config = text != nullptr && text->is_object() ? *text : config;
  for (const auto& [key, value] : own_config.items()) {
    if (value.is_number_integer()) model->sizes[key] = value.get<int64_t>();
  }
  if (const auto count = model->sizes.find("num_hidden_layers"); count != model->sizes.end())
    model->layers = count->second;
  bool tied = false;
  std::vector<Parts> untied;
  for (const auto& [key, value] : entry->items()) {
    if (key == "refused") {
      model->refused = value.get<std::string>();
    } else if (key == "dropped") {
      model->dropped = patterns(value.get_ref<const std::string&>());
    } else if (key == "untied") {
      untied = patterns(value.get_ref<const std::string&>());
    } else if (key == "head") {
      model->own_head = value.get<std::string>() + ".weight";
    } else if (key == "tied") {
      tied = value.get<bool>();
    } else if (key == "names") {
      for (const auto& [source, target] : value.items())
        model->rules.push_back(
            {names::components(source), names::components(target.get_ref<const std::string&>())});
    } else if (key == "fused") {
      for (const auto& [target, how] : value.items()) {
        // Ways are apart by " | "; in each the operations by ", ", and ": " is before the source.
        const auto text_of = how.get<std::string>();
        for (size_t begin = 0; begin < text_of.size();) {
          const size_t end = std::min(text_of.find(" | ", begin), text_of.size());
          const std::string way = text_of.substr(begin, end - begin);
          const size_t colon = way.find(": ");
          Recipe recipe{split(target, '.'), split(way.substr(colon + 2), '.'), false, {}};
          for (size_t from = 0; from < colon;) {
            const size_t to = std::min(way.find(", ", from), colon);
            const std::string operation = way.substr(from, to - from);
            if (operation == "stack 0")
              recipe.stack = true;
            else
              recipe.operations.push_back(operation);
            from = to + 2;
          }
          model->recipes.push_back(std::move(recipe));
          begin = end + 3;
        }
      }
    } else {
      Listed listed = listed_of(key);
      for (Parts& module : patterns(value.get_ref<const std::string&>())) {
        listed.module = std::move(module);
        model->listed.push_back(listed);
      }
    }
  }
  if (const json* own = member(own_config, "tie_word_embeddings"); own != nullptr && own->is_boolean())
    tied = own->get<bool>();
  if (tied)
    model->tied = std::move(untied);
  else
    model->own_head.clear();
  return MlxModel(std::move(model));
}

const std::string& MlxModel::refused() const { return model_->refused; }

MlxModel::Weights MlxModel::weights(std::span<const Weight> input) const {
  const Model& model = *model_;
  HALFBYTE_CHECK(model.refused.empty(), bug, "{}: {}", model.model_type, model.refused);
  const bool as_is = model.is_saved_by_mlx(input);
  struct Planned {
    std::string target;
    const Recipe* recipe;                             // null: the whole weight
    std::vector<std::pair<int64_t, size_t>> sources;  // with the number of the expert
  };
  Weights result;
  std::vector<Planned> planned;
  std::map<std::string, size_t, std::less<>> place;  // in `planned`
  for (size_t i = 0; i < input.size(); ++i) {
    const Parts name = split(input[i].name, '.');
    bool used = false, left_out = false;
    const auto plan = [&](const Parts& parts, const Recipe* recipe, int64_t number) {
      if (model.is_dropped(name, parts, input[i])) {
        left_out = true;
        return;
      }
      std::string target = names::join(parts, 0, parts.size());
      const auto [found, is_new] = place.try_emplace(target, planned.size());
      if (is_new) planned.push_back({std::move(target), recipe, {}});
      Planned& one = planned[found->second];
      HALFBYTE_CHECK(is_new || (one.recipe == recipe && recipe != nullptr && recipe->stack), bad_input,
                     "\"{}\" and \"{}\" are both tensor \"{}\" of mlx-lm",
                     printable(input[one.sources.front().second].name), printable(input[i].name),
                     printable(one.target));
      one.sources.emplace_back(number, i);
      used = true;
    };
    for (const Recipe& recipe : model.recipes) {
      if (as_is || !matches(recipe.source, name, 0, name.size())) continue;
      const Parts target = names::with_numbers(recipe.source, recipe.target, name, 0);
      const Parts numbers = names::numbers(recipe.source, name, 0);
      HALFBYTE_CHECK(!recipe.stack || numbers.back().size() <= 9, bad_input,
                     "\"{}\": no expert has this number", printable(input[i].name));
      plan(target, &recipe, recipe.stack ? integer(numbers.back()) : 0);
    }
    if (!used && !left_out)
      plan(as_is ? name : split(names::renamed(model.rules, input[i].name), '.'), nullptr, 0);
    if (!used) result.dropped.push_back(i);
  }
  bool known = false;
  for (Planned& one : planned) {
    std::sort(one.sources.begin(), one.sources.end());
    if (one.recipe != nullptr) {
      result.weights.push_back(model.make(one.target, *one.recipe, one.sources, input));
    } else {
      const size_t index = one.sources.front().second;
      OutputWeight output{one.target, input[index].shape, {}};
      add_rows(View(index, output.shape), output.sources);
      result.weights.push_back(model.classified(std::move(output)));
    }
    known = known || result.weights.back().kind != MlxWeight::Kind::other;
  }
  const auto embedding = std::ranges::find(result.weights, MlxWeight::Kind::embedding, &MlxWeight::kind);
  if (!model.own_head.empty() && !place.contains(model.own_head) && embedding != result.weights.end()) {
    OutputWeight head = embedding->weight;
    head.name = model.own_head;
    result.weights.push_back(model.classified(std::move(head)));
  }
  HALFBYTE_CHECK(known || input.empty(), bad_input,
                 "no tensor has a name that mlx-lm's model {} reads, as \"{}\"", model.model_type,
                 printable(input.empty() ? "" : input[0].name));
  return result;
}

}  // namespace halfbyte::io
