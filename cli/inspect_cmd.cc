// halfbyte inspect PATH
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

namespace {

// The dtypes of the stored parts: "BF16", "F32+U8".
std::string stored_as(const Checkpoint& checkpoint, const Weight& weight) {
  std::set<std::string> dtypes;
  for (const int part : weight.parts) dtypes.insert(checkpoint.tensors()[static_cast<size_t>(part)].dtype);
  return fmt::format("{}", fmt::join(dtypes, "+"));
}

Json tensor_json(const StoredTensor& tensor) {
  return {{"name", tensor.name}, {"dtype", tensor.dtype},   {"shape", tensor.shape},
          {"file", tensor.file}, {"offset", tensor.offset}, {"num_bytes", tensor.num_bytes}};
}

Json weight_json(const Weight& weight) {
  return {{"name", weight.name},
          {"shape", weight.shape},
          {"dtype", weight.dtype ? Json(to_string(*weight.dtype)) : Json()},
          {"layout", weight.layout ? Json(to_string(*weight.layout)) : Json()},
          {"spec", weight.layout ? spec_json(weight.spec, weight.scale_rows) : Json()},
          {"foreign", weight.foreign.empty() ? Json() : Json(weight.foreign)},
          {"note", weight.note.empty() ? Json() : Json(weight.note)},
          {"parts", weight.parts},
          {"num_bytes", weight.num_bytes},
          {"bits_per_weight", bits_per_weight(weight)}};
}

Json foreign_json(const ForeignQuantization& foreign) {
  Json parameters = Json::object();
  for (const auto& [key, value] : foreign.parameters) parameters[key] = Json::parse(value);
  return {{"method", foreign.method},
          {"layout", foreign.layout.empty() ? Json() : Json(foreign.layout)},
          {"source", foreign.source},
          {"parameters", std::move(parameters)},
          {"num_weights", foreign.num_weights},
          {"example", foreign.example.empty() ? Json() : Json(foreign.example)},
          {"advice", foreign.advice}};
}

// "fp8 (modelopt), 56 weights, quant_algo FP8; from config.json"
std::string foreign_text(const ForeignQuantization& foreign) {
  std::string text = printable(foreign.method);
  if (!foreign.layout.empty() && foreign.layout != foreign.method)
    text += fmt::format(" ({})", printable(foreign.layout));
  text += fmt::format(", {} weights", foreign.num_weights);
  for (const auto& [key, value] : foreign.parameters) {
    const Json json = Json::parse(value);
    text += fmt::format(", {} {}", key, printable(json.is_string() ? json.get<std::string>() : value));
  }
  return text + fmt::format("; from {}", foreign.source);
}

// `lists`: whether anybody reads the document's weights and tensors.
void run(const std::string& path, bool lists, std::string& text, Json& document) {
  document["path"] = path;
  document["valid"] = false;
  const Checkpoint checkpoint = Checkpoint::open(path, [](const Progress&) { return !is_cancelled(); });
  document["valid"] = true;

  Table table({{"name"},
               {"shape"},
               {"stored as"},
               {"format"},
               {"group"},
               {"layout"},
               {"bits/weight", Align::right},
               {"bytes", Align::right}});
  Json weights = Json::array(), tensors = Json::array();
  BitsPerWeight bits;
  std::map<std::string, int64_t> notes;  // how many weights have each
  int64_t num_quantized = 0, num_foreign = 0;
  uint64_t num_bytes = 0;
  for (const Weight& weight : checkpoint.weights()) {
    const bool quantized = weight.layout.has_value();
    if (quantized) {
      ++num_quantized;
      bits.add(weight.num_bytes, weight.shape);
    }
    if (!weight.foreign.empty()) ++num_foreign;
    num_bytes += weight.num_bytes;
    table.add_row({printable(weight.name), format_shape(weight.shape), stored_as(checkpoint, weight),
                   quantized                 ? format_name(weight.spec)
                   : !weight.foreign.empty() ? printable(weight.foreign)
                                             : "-",
                   quantized ? group_name(weight.spec, weight.scale_rows) : "-",
                   quantized ? to_string(*weight.layout) : "-",
                   fmt::format("{:.3f}", bits_per_weight(weight)), fmt::format("{}", weight.num_bytes)});
    if (!weight.note.empty()) ++notes[weight.note];
    if (lists) weights.push_back(weight_json(weight));
  }
  if (lists)
    for (const StoredTensor& tensor : checkpoint.tensors()) tensors.push_back(tensor_json(tensor));

  const int64_t num_dense = static_cast<int64_t>(checkpoint.weights().size()) - num_quantized - num_foreign;
  Json foreign = Json::array();
  text += table.text();
  text += "\n";
  text += summary_line("quantized",
                       fmt::format("{} weights, {:.3f} bits per weight", num_quantized, bits.value()));
  for (const auto& [note, count] : notes)
    text += summary_line("note", fmt::format("{} weights: {}", count, printable(note)));
  for (const ForeignQuantization& quantization : checkpoint.foreign()) {
    text += summary_line("not read", foreign_text(quantization));
    text += summary_line("", printable(quantization.advice));
    foreign.push_back(foreign_json(quantization));
  }
  text += summary_line("dense", fmt::format("{} weights", num_dense));
  text += summary_line("bytes", fmt::format("{} ({})", num_bytes, format_bytes(num_bytes)));
  text += summary_line("valid", "yes");

  document["is_directory"] = checkpoint.is_directory();
  document["num_quantized"] = num_quantized;
  document["foreign"] = std::move(foreign);
  document["num_bytes"] = num_bytes;
  document["bits_per_weight"] = bits.value();
  document["weights"] = std::move(weights);
  document["tensors"] = std::move(tensors);
}

}  // namespace

void add_inspect_command(CLI::App& app, Command& command) {
  const auto path = std::make_shared<std::string>();
  CLI::App& sub = *app.add_subcommand("inspect", "Show the weights of a checkpoint and how they are stored");
  sub.add_option("PATH", *path, "A .safetensors file or a model directory")
      ->required()
      ->option_text("REQUIRED");
  add_report_options(sub, command);
  sub.callback([path, &command] {
    command.name = "inspect";
    command.run = [path, &command](std::string& text, Json& document) {
      run(*path, !command.json_path.empty(), text, document);
    };
  });
}

}  // namespace halfbyte::cli
