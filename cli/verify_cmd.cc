// halfbyte verify: whether a quantized checkpoint keeps the rules that its readers rely on.
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

void run(const std::string& path, std::string& text, Json& document) {
  Json rows = Json::array();
  ProgressBar progress(true);
  const std::vector<Fault> faults = verify_checkpoint(path, progress.function());
  for (const Fault& fault : faults) {
    text += fmt::format("{}  {}: {}\n", fault.rule, printable(fault.name), fault.text);
    rows.push_back({{"rule", fault.rule}, {"name", fault.name}, {"text", fault.text}});
  }
  text += summary_line("faults", fmt::format("{}", faults.size()));
  document["faults"] = std::move(rows);
  if (!faults.empty())
    throw Error(ErrorCode::verify,
                fmt::format("verify: \"{}\" has faults: {}, the first {}: {}", printable(path), faults.size(),
                            faults.front().rule, printable(faults.front().name)));
}

}  // namespace

void add_verify_command(CLI::App& app, Command& command) {
  const auto path = std::make_shared<std::string>();
  CLI::App& sub = *app.add_subcommand(
      "verify", "Check a quantized checkpoint against the rules that its readers rely on");
  sub.add_option("PATH", *path, "A .safetensors file or a model directory")
      ->required()
      ->option_text("REQUIRED");
  add_report_options(sub, command);
  sub.callback([path, &command] {
    command.name = "verify";
    command.run = [path](std::string& text, Json& document) { run(*path, text, document); };
  });
}

}  // namespace halfbyte::cli
