// Options that several subcommands have.
#pragma once

#include <string>

#include "command.h"

namespace halfbyte::cli {

// --json and --force.
void add_report_options(CLI::App& app, Command& command);

struct Destination {
  std::string path;
  bool dry_run = false;
};
// -o and --dry-run.
void add_destination_options(CLI::App& app, Destination& destination);
// Called when all is parsed: only a dry run needs no -o.
void check_destination(const Destination& destination);

struct ComputeArguments {
  std::string device = "auto";
  int num_threads = 0;
  std::string progress = "auto";
};
// --device, --threads and --progress.
void add_compute_options(CLI::App& app, ComputeArguments& arguments);

// The device that runs, in words; with "auto" also why it is not the other one. Throws Error(device)
// where the device asked for cannot run: an explicit request never falls back.
std::string select_device(const std::string& device);

}  // namespace halfbyte::cli
