// halfbyte dequantize IN -o OUT
#include <CLI/App.hpp>
#include <memory>

#include "command.h"
#include "halfbyte/checkpoint.hpp"
#include "options.h"
#include "process_group.h"
#include "progress.h"
#include "report.h"

namespace halfbyte::cli {

namespace {

struct DequantizeArguments {
  std::string input, dtype;
  Destination destination;
  ComputeArguments compute;
};

void run(const DequantizeArguments& arguments, const Command& command, std::string& text, Json& document) {
  DequantizeOptions options;
  DeviceChoice device;
  before_all(command.group.get(), [&] {
    if (!arguments.dtype.empty()) options.dtype = parse_dtype(arguments.dtype);
    options.shard_bytes = parse_shard_size(arguments.destination.shard_size);
    // 2.4 GB of codes to 17 GB: 3.7 s on 32 threads of a CPU, 5.9 s with two H200, where the driver alone
    // takes 0.5 s to start.
    if (arguments.compute.device == "auto")
      device.note = "what is written limits the run";
    else
      device = select_devices(arguments.compute.device);
  });
  options.dry_run = arguments.destination.dry_run;
  options.force = command.force;
  options.unfinished = arguments.destination.unfinished();
  options.num_threads = arguments.compute.num_threads;
  options.devices = device.devices;
  options.process_group = command.group;
  const RunInfo info = {"dequantized", device, options.dry_run, /*verified=*/false};
  ProgressBar progress(arguments.compute.progress == "auto" && leads(command.group.get()));
  options.progress = progress.function();
  const CheckpointReport report = dequantize_checkpoint(arguments.input, arguments.destination.path, options);
  if (leads(command.group.get())) describe(report, info, text, document);  // others have a part
}

}  // namespace

void add_dequantize_command(CLI::App& app, Command& command) {
  const auto arguments = std::make_shared<DequantizeArguments>();
  CLI::App& sub = *app.add_subcommand("dequantize", "Make the quantized weights of a checkpoint dense again");
  sub.add_option("IN", arguments->input, "A .safetensors file or a model directory")
      ->required()
      ->option_text("REQUIRED");
  add_destination_options(sub, arguments->destination);
  sub.add_option("--dtype", arguments->dtype,
                 "f32, f16 or bf16 (default: the dtype that each weight had before)")
      ->option_text("DTYPE");
  add_compute_options(sub, arguments->compute);
  add_report_options(sub, command);
  sub.callback([arguments, &command] {
    check_destination(arguments->destination);
    command.name = "dequantize";
    command.takes_processes = true;
    if (!arguments->destination.dry_run) command.output = arguments->destination.path;
    command.unfinished = arguments->destination.unfinished();
    command.run = [arguments, &command](std::string& text, Json& document) {
      run(*arguments, command, text, document);
    };
  });
}

}  // namespace halfbyte::cli
