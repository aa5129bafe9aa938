#include "options.h"

#include <fmt/format.h>

#include <CLI/App.hpp>

#include "halfbyte/error.hpp"
#include "halfbyte/system.hpp"
#include "output.h"

namespace halfbyte::cli {

void add_report_options(CLI::App& app, Command& command) {
  app.add_option("--json", command.json_path, "Write a JSON report to FILE (-: stdout, instead of the text)")
      ->option_text("FILE");
  app.add_flag("--force", command.force, "Replace what exists");
}

void add_destination_options(CLI::App& app, Destination& destination) {
  app.add_option("-o,--output", destination.path, "The file or directory to write")->option_text("OUT");
  app.add_flag("--dry-run", destination.dry_run, "Only report what would be done; needs no -o");
}

void check_destination(const Destination& destination) {
  if (destination.path.empty() && !destination.dry_run) throw CLI::RequiredError("--output");
}

void add_compute_options(CLI::App& app, ComputeArguments& arguments) {
  app.add_option("--device", arguments.device, "auto (default), cpu, cuda or cuda:N")->option_text("DEVICE");
  app.add_option("--threads", arguments.num_threads, "Number of CPU threads (default 0: all)")
      ->check(CLI::Range(0, 4096))
      ->option_text("N");
  app.add_option("--progress", arguments.progress, "auto (default: on a terminal) or never")
      ->check(CLI::IsMember({"auto", "never"}))
      ->option_text("WHEN");
}

std::string select_device(const std::string& device) {
  if (device == "cpu") return "cpu";
  const std::string cuda = fmt::format("CUDA: {}", system_info().cuda_status);
  if (device == "auto") return fmt::format("cpu ({})", cuda);
  const bool is_cuda = device == "cuda" || (device.starts_with("cuda:") && device.size() > 5 &&
                                            device.find_first_not_of("0123456789", 5) == std::string::npos);
  if (!is_cuda)
    throw Error(ErrorCode::usage,
                fmt::format("--device: expected auto, cpu, cuda or cuda:N, got '{}'", printable(device)));
  throw Error(ErrorCode::device, fmt::format("--device {}: no such device ({})", device, cuda));
}

}  // namespace halfbyte::cli
