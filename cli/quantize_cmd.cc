// halfbyte quantize IN -o OUT
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <memory>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"
#include "output.h"
#include "process_group.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

namespace {

// As typed; words are checked when the command runs.
struct QuantizeArguments {
  std::string input;
  std::string format = "nf4";
  std::string group_size, layout, reader, scale_rule, scale_dtype, table, importance;
  std::string nonfinite = "error";
  std::string fallback;
  std::vector<std::string> include, exclude;
  bool asymmetric = false, double_quant = false, search = false, force_layout = false,
       keep_embeddings = false, no_verify = false;
  Destination destination;
  ComputeArguments compute;
};

// The message names the option.
std::array<float, 16> parse_table_option(const std::string& text) {
  try {
    return parse_table(text);
  } catch (const Error& error) {
    throw Error(error.code(), "--" + printable(error.what()));
  }
}

QuantizeOptions to_options(const QuantizeArguments& arguments, bool force) {
  QuantizeOptions options;
  options.format = find_format(arguments.format).format;
  if ((options.format == Format::lut4) != !arguments.table.empty())
    throw Error(ErrorCode::usage,
                fmt::format("--format lut4 and --table go together, got --format {} and {} table",
                            arguments.format, arguments.table.empty() ? "no" : "a"));
  if (!arguments.table.empty()) options.table = parse_table_option(arguments.table);
  options.asymmetric = arguments.asymmetric;
  options.double_quant = arguments.double_quant;
  if (!arguments.group_size.empty()) {
    const GroupSize group = parse_group_size(arguments.group_size);
    if (group.granularity == Granularity::group)
      options.group_size = group.size;  // flat groups too, where the layout has them
    else
      options.granularity = group.granularity;
  }
  if (!arguments.layout.empty()) options.layout = parse_layout(arguments.layout);
  if (!arguments.reader.empty()) options.reader = parse_reader(arguments.reader);
  options.force_layout = arguments.force_layout;
  options.keep_embeddings = arguments.keep_embeddings;
  if (!arguments.scale_rule.empty()) options.scale_rule = parse_scale_rule(arguments.scale_rule);
  if (!arguments.scale_dtype.empty()) options.scale_dtype = parse_dtype(arguments.scale_dtype);
  if (!arguments.importance.empty() && !arguments.search)
    throw Error(ErrorCode::usage, "--importance is for searched scales: it needs --search");
  options.search = arguments.search;
  options.importance = arguments.importance;
  options.nonfinite = arguments.nonfinite == "error" ? NonFinite::error : NonFinite::keep_dense;
  options.include = arguments.include;
  options.exclude = arguments.exclude;
  options.fallback_dense = arguments.fallback == "dense";
  options.dry_run = arguments.destination.dry_run;
  options.shard_bytes = parse_shard_size(arguments.destination.shard_size);
  options.verify = !arguments.no_verify;
  options.force = force;
  options.unfinished = arguments.destination.unfinished();
  options.num_threads = arguments.compute.num_threads;
  return options;
}

void run(const QuantizeArguments& arguments, const Command& command, std::string& text, Json& document) {
  QuantizeOptions options;
  DeviceChoice device;
  before_all(command.group.get(), [&] {
    options = to_options(arguments, command.force);
    device = select_devices(arguments.compute.device);
  });
  options.devices = device.devices;
  options.choose_devices = device.devices.empty();
  options.process_group = command.group;
  const RunInfo info = {"quantized", device, options.dry_run, options.verify && !options.dry_run,
                        options.importance};
  ProgressBar progress(arguments.compute.progress == "auto" && leads(command.group.get()));
  options.progress = progress.function();
  const CheckpointReport report = quantize_checkpoint(arguments.input, arguments.destination.path, options);
  if (leads(command.group.get())) describe(report, info, text, document);  // others have a part
}

}  // namespace

void add_quantize_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<QuantizeArguments>();
  CLI::App& sub = *app.add_subcommand("quantize", "Quantize the weights of a checkpoint");
  const auto add = [&](const std::string& name, auto& value, const char* placeholder,
                       const std::string& help) {
    return sub.add_option(name, value, help)->option_text(placeholder);
  };

  std::string formats;
  for (const FormatInfo& format : all_formats())
    formats += fmt::format("{}{}", formats.empty() ? "" : ", ", format.name);

  add("IN", arguments->input, "REQUIRED", "A .safetensors file or a model directory")->required();
  add_destination_options(sub, arguments->destination);
  add("--format", arguments->format, "FORMAT", fmt::format("{} (default nf4)", formats));
  add("--layout", arguments->layout, "LAYOUT",
      "How the file stores the weights: halfbyte, bitsandbytes, compressed-tensors, mlx, gptq, awq, "
      "modelopt, fp8 or gpt-oss (default: by format)");
  add("--reader", arguments->reader, "NAME",
      "What the output must load in: transformers-5, transformers-4, vllm, mlx-lm or none (default: by "
      "layout)");
  add("--group-size", arguments->group_size, "SIZE",
      "How many elements share a scale: a number, channel (a row) or tensor (default: by layout)");
  sub.add_flag("--asymmetric", arguments->asymmetric, "Integer formats: add a zero point");
  sub.add_flag("--double-quant", arguments->double_quant, "Quantize the scales too, to 8 bits");
  add("--scale-rule", arguments->scale_rule, "RULE",
      "absmax, half-range, signed-max, minmax or mlx-edge (default: by format and layout)");
  add("--scale-dtype", arguments->scale_dtype, "DTYPE", "f32, f16 or bf16 (default: by layout)");
  sub.add_flag("--search", arguments->search,
               "Of sixteen scales of each group, take the one with the least squared error");
  add("--importance", arguments->importance, "FILE",
      "With --search: a .safetensors file with the importance of the input channels of each weight, F32 "
      "[columns] "
      "under its name");
  add("--table", arguments->table, "V0,...,V15", "The 16 values of lut4, in ascending order");
  add("--include", arguments->include, "REGEX",
      "Quantize the weights whose names match, instead of the linear layers (repeatable)")
      ->allow_extra_args(false);
  add("--exclude", arguments->exclude, "REGEX", "Keep the weights whose names match dense (repeatable)")
      ->allow_extra_args(false);
  sub.add_flag("--force-layout", arguments->force_layout,
               "Let --include select weights that the reader cannot load in this layout");
  sub.add_flag("--keep-embeddings", arguments->keep_embeddings,
               "Keep embeddings and head dense, which mlx-lm quantizes");
  add("--nonfinite", arguments->nonfinite, "POLICY",
      "What to do with a weight that has NaN or infinity: error (default) or keep-dense")
      ->check(CLI::IsMember({"error", "keep-dense"}));
  add("--fallback", arguments->fallback, "dense",
      "If the layout cannot hold a weight, keep it dense (default: an error)")
      ->check(CLI::IsMember({"dense"}));
  sub.add_flag("--no-verify", arguments->no_verify,
               "Do not read the output back and compare it with the input");
  add_compute_options(sub, arguments->compute);
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    check_destination(arguments->destination);
    command.name = "quantize";
    command.takes_processes = true;
    if (!arguments->destination.dry_run) command.output = arguments->destination.path;
    command.unfinished = arguments->destination.unfinished();
    command.run = [arguments, &command](std::string& text, Json& document) {
      run(*arguments, command, text, document);
    };
  });
}

}  // namespace halfbyte::cli
