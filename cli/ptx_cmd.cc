// halfbyte ptx [OP] --arch TARGET
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "command.h"
#include "halfbyte/error.hpp"
#include "halfbyte/kernels.hpp"
#include "options.h"
#include "output.h"
#include "progress.h"

namespace halfbyte::cli {

namespace {

struct PtxArguments {
  std::string op, kernel, arch, output;
  bool describe = false;
  KernelConfig config;
};

bool is_flag(const KernelKey& key) { return key.values == std::vector<std::string>{"no", "yes"}; }

// "nf4 (default), fp4, ..."
std::string values_text(const KernelKey& key) {
  std::string text;
  for (const std::string& value : key.values)
    text += fmt::format("{}{}", text.empty() ? "" : value == key.values[1] ? " (default), " : ", ", value);
  return key.open ? text + (text.empty() ? "..." : ", ...") : text;
}

std::string key_line(const KernelKey& key) {
  const std::string values = is_flag(key) ? "" : values_text(key);
  return fmt::format("  --{:<12} {}{}{}\n", key.name, key.description, values.empty() ? "" : " ", values);
}

void list(std::string& text, Json& document) {
  Json kernels = Json::array();
  for (const KernelInfo& kernel : all_kernels()) {
    text += fmt::format("{} --kernel {}: {}{}\n", kernel.op, kernel.name, kernel.description,
                        kernel.target.empty() ? "" : fmt::format(" For {} only.", kernel.target));
    Json keys = Json::array();
    for (const KernelKey& key : kernel.keys) {
      text += key_line(key);
      keys.push_back({{"name", key.name},
                      {"values", key.values},
                      {"open", key.open},
                      {"default", key.default_value()},
                      {"description", key.description}});
    }
    text += "\n";
    kernels.push_back({{"op", kernel.op},
                       {"name", kernel.name},
                       {"description", kernel.description},
                       {"target", kernel.target},
                       {"plain", kernel.plain},
                       {"keys", std::move(keys)}});
  }
  document["kernels"] = std::move(kernels);
  document["targets"] = Json::array();
  std::string targets;
  try {
    targets = fmt::format("{}", fmt::join(kernel_targets(), " "));
    document["targets"] = kernel_targets();
  } catch (const Error& error) {  // the list needs no NVRTC
    targets = fmt::format("none: {}", error.what());
  }
  text += summary_line("--arch", targets);
}

std::string kernel_of(const PtxArguments& arguments) {
  if (arguments.kernel.empty()) return choose_kernel(arguments.op, arguments.config).name;
  for (const KernelInfo& info : all_kernels())
    if (info.name == arguments.kernel && info.op != arguments.op)
      throw Error(ErrorCode::usage, fmt::format("--kernel {} is of {}, not of {}", arguments.kernel, info.op,
                                                printable(arguments.op)));
  return arguments.kernel;
}

// The description, as text and as the document.
void describe(const PtxArguments& arguments, bool force, std::string& text, Json& document) {
  const std::string kernel = kernel_of(arguments);
  std::optional<ReportFile> file;
  if (!arguments.output.empty()) file.emplace("--output", arguments.output, force);
  Json description = Json::parse(to_json(describe_kernel(kernel, arguments.config)));
  if (!arguments.arch.empty()) description["target"] = arguments.arch;
  const std::string json = description.dump(2) + "\n";
  document.update(description);
  if (!file) {
    text = json;
    return;
  }
  file->commit(json);
  text += summary_line("kernel", kernel);
  text += summary_line("output", printable(arguments.output));
}

void emit(const PtxArguments& arguments, bool force, std::string& text, Json& document) {
  const std::string kernel = kernel_of(arguments);
  std::optional<ReportFile> file;
  if (!arguments.output.empty()) file.emplace("--output", arguments.output, force);
  const std::string ptx = emit_ptx(kernel, arguments.config, arguments.arch);
  if (is_cancelled()) throw Error(ErrorCode::cancelled, "cancelled");  // NVRTC cannot be stopped
  Json config = Json::object();
  for (const auto& [key, value] : arguments.config) config[key] = value;
  document["op"] = arguments.op;
  document["kernel"] = kernel;
  document["config"] = std::move(config);
  document["target"] = arguments.arch;
  document["num_bytes"] = ptx.size();
  if (!file) {
    text = ptx;
    document["ptx"] = ptx;
    return;
  }
  file->commit(ptx);
  document["output"] = arguments.output;
  text += summary_line("kernel", fmt::format("{} for {}", kernel, arguments.arch));
  text +=
      summary_line("output", fmt::format("{} ({})", printable(arguments.output), format_bytes(ptx.size())));
}

// An option for each key that some kernel has, as the first that has it describes it.
void add_key_options(CLI::App& sub, const std::shared_ptr<PtxArguments>& arguments) {
  for (const KernelInfo& kernel : all_kernels())
    for (const KernelKey& key : kernel.keys) {
      const std::string option = "--" + key.name;
      if (sub.get_option_no_throw(option)) continue;
      const auto set = [arguments, name = key.name](const std::string& value) {
        arguments->config.emplace_back(name, value);
      };
      if (is_flag(key))
        sub.add_flag_callback(
            option, [set] { set("yes"); }, key.description);
      else
        sub.add_option_function<std::string>(option, set, key.description)->option_text("VALUE");
    }
}

}  // namespace

void add_ptx_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<PtxArguments>();
  CLI::App& sub = *app.add_subcommand("ptx", "Print a CUDA kernel as PTX; without OP, list the kernels");
  sub.add_option("OP", arguments->op, "quantize, dequantize, ...")->option_text(" ");
  sub.add_option("--arch", arguments->arch, "The GPU target to compile for, such as sm_90a")
      ->option_text("TARGET");
  sub.add_option("--kernel", arguments->kernel,
                 "A kernel of the op (default: the plain one, or the one that the other options choose)")
      ->option_text("NAME");
  sub.add_flag("--describe", arguments->describe,
               "Print instead what a plain kernel is given and how it is launched, as JSON");
  add_key_options(sub, arguments);
  sub.add_option("-o,--output", arguments->output, "Write to FILE instead of standard output")
      ->option_text("FILE");
  add_report_options(sub, command);
  sub.footer("'halfbyte ptx' lists the kernels, which of these options each takes, and their values.");
  sub.callback([arguments, &command] {
    if (!arguments->op.empty() && arguments->arch.empty() && !arguments->describe)
      throw CLI::RequiredError("--arch");
    if (arguments->op.empty() && !(arguments->arch.empty() && arguments->kernel.empty() &&
                                   arguments->config.empty() && !arguments->describe))
      throw CLI::RequiredError("OP");
    command.name = "ptx";
    command.output = arguments->output;
    command.run = [arguments, &command](std::string& text, Json& document) {
      if (arguments->op.empty())
        list(text, document);
      else if (arguments->describe)
        describe(*arguments, command.force, text, document);
      else
        emit(*arguments, command.force, text, document);
    };
  });
}

}  // namespace halfbyte::cli
