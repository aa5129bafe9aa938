// halfbyte convert IN -o OUT --layout LAYOUT
#include <CLI/App.hpp>
#include <memory>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

namespace {

struct ConvertArguments {
  std::string input, layout, experts, reader;
  bool requantize = false, force_layout = false, no_verify = false;
  Destination destination;
  ComputeArguments compute;
};

void run(const ConvertArguments& arguments, const Command& command, std::string& text, Json& document) {
  ConvertOptions options;
  check_cpu(arguments.compute.device, "convert");
  options.layout = parse_layout(arguments.layout);
  options.requantize = arguments.requantize;
  if (!arguments.experts.empty()) options.experts = parse_expert_form(arguments.experts);
  if (!arguments.reader.empty()) options.reader = parse_reader(arguments.reader);
  options.force_layout = arguments.force_layout;
  options.verify = !arguments.no_verify;
  options.shard_bytes = parse_shard_size(arguments.destination.shard_size);
  options.force = command.force;
  options.process_group = command.group;
  options.unfinished = arguments.destination.unfinished();
  options.num_threads = arguments.compute.num_threads;
  options.dry_run = arguments.destination.dry_run;
  const RunInfo info = {"converted", {}, options.dry_run, options.verify};
  ProgressBar progress(arguments.compute.progress == "auto");
  options.progress = progress.function();
  describe(convert_checkpoint(arguments.input, arguments.destination.path, options), info, text, document);
}

}  // namespace

void add_convert_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<ConvertArguments>();
  CLI::App& sub = *app.add_subcommand(
      "convert", "Write a quantized checkpoint in another layout, with the codes that it has");
  const auto add = [&](const std::string& name, auto& value, const char* placeholder, const char* help) {
    return sub.add_option(name, value, help)->option_text(placeholder);
  };
  add("IN", arguments->input, "REQUIRED", "A .safetensors file or a model directory")->required();
  add_destination_options(sub, arguments->destination);
  add("--layout", arguments->layout, "LAYOUT",
      "halfbyte, bitsandbytes, compressed-tensors, mlx, gptq, awq, modelopt, fp8 or gpt-oss")
      ->required();
  sub.add_flag("--requantize", arguments->requantize,
               "Decode what cannot keep its codes, and quantize it as the layout does it");
  add("--experts", arguments->experts, "FORM",
      "Of layout bitsandbytes, the experts: per-expert, parametrize or experts4bit (default: as they are)");
  add("--reader", arguments->reader, "NAME",
      "What the output must load in: transformers-5, transformers-4, vllm, mlx-lm or none (default: by "
      "layout)");
  sub.add_flag("--force-layout", arguments->force_layout,
               "Write weights that the reader cannot load in this layout");
  sub.add_flag("--no-verify", arguments->no_verify,
               "Do not read the output back and compare it with the input");
  add_compute_options(sub, arguments->compute);
  sub.get_option("--device")->description("auto (default) or cpu: convert runs on the CPU only");
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    check_destination(arguments->destination);
    command.name = "convert";
    command.takes_processes = true;
    if (!arguments->destination.dry_run) command.output = arguments->destination.path;
    command.unfinished = arguments->destination.unfinished();
    command.run = [arguments, &command](std::string& text, Json& document) {
      run(*arguments, command, text, document);
    };
  });
}

}  // namespace halfbyte::cli
