// halfbyte repair: one global scale for weights of one product.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "halfbyte/verify.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"

namespace halfbyte::cli {
namespace {

struct RepairArguments {
  std::string input, output;
};

void run(const RepairArguments& arguments, bool force, std::string& text, Json& document) {
  ProgressBar progress(true);
  const RepairReport report =
      repair_checkpoint(arguments.input, arguments.output, force, progress.function());
  Json rows = Json::array();
  for (const RepairedWeight& weight : report.weights) {
    text += fmt::format("{}: global scale {:.9g} -> {:.9g}, {} scales\n", printable(weight.name),
                        weight.global_scale_before, weight.global_scale, weight.num_scales);
    rows.push_back({{"name", weight.name},
                    {"global_scale_before", weight.global_scale_before},
                    {"global_scale", weight.global_scale},
                    {"num_scales", weight.num_scales}});
  }
  text += summary_line("repaired", fmt::format("{} weights", report.weights.size()));
  text += summary_line("output", printable(arguments.output));
  document["output"] = arguments.output;
  document["weights"] = std::move(rows);
}

}  // namespace

void add_repair_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<RepairArguments>();
  CLI::App& sub = *app.add_subcommand(
      "repair", "Write a checkpoint in which weights of nvfp4 that runtimes fuse share their global scale");
  sub.add_option("IN", arguments->input, "A .safetensors file or a model directory")
      ->required()
      ->option_text("REQUIRED");
  sub.add_option("-o,--output", arguments->output, "The mended copy")->required()->option_text("REQUIRED");
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    command.name = "repair";
    command.output = arguments->output;
    command.run = [arguments, &command](std::string& text, Json& document) {
      run(*arguments, command.force, text, document);
    };
  });
}

}  // namespace halfbyte::cli
