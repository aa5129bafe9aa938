// Options that several subcommands have.
#pragma once

#include <string>

#include "command.h"
#include "halfbyte/device.hpp"
#include "halfbyte/format.hpp"

namespace halfbyte::cli {

// --json and --force.
void add_report_options(CLI::App& app, Command& command);

struct Destination {
  std::string path, shard_size;
  bool dry_run = false, resume = false, discard = false;

  Unfinished unfinished() const {
    return resume ? Unfinished::resume : discard ? Unfinished::discard : Unfinished::keep;
  }
};
// -o, --dry-run, --shard-size, --resume and --discard.
void add_destination_options(CLI::App& app, Destination& destination);
// Bytes of --shard-size; 0 where it is not given. Error(usage) for what is no size.
uint64_t parse_shard_size(const std::string& text);
// Called when all is parsed: only a dry run needs no -o.
void check_destination(const Destination& destination);

struct ComputeArguments {
  std::string device = "auto";
  int num_threads = 0;
  std::string progress = "auto";
};
// --device, --threads and --progress.
void add_compute_options(CLI::App& app, ComputeArguments& arguments);

struct DeviceChoice {
  std::vector<Device> devices = {Device{}};
  std::string note = {};  // the names of CUDA devices; why "auto" took the CPU alone
};
// "cpu", "cpu (no CUDA driver: ...)", "cuda:0 (NVIDIA H200)"
std::string to_string(const DeviceChoice& choice);

// The names of CUDA devices among them.
std::string names_of(std::span<const Device> devices);
// None for "auto", which is for the work to choose. Throws Error(usage) for unknown words, and Error(device)
// where a device asked for cannot be used: an explicit request never falls back.
DeviceChoice select_devices(const std::string& words);
// For a command that runs on the CPU only: Error(device) where another device is asked for.
void check_cpu(const std::string& word, const std::string& command);

// Of --group-size: a number of elements, "channel" or "tensor". Error(usage) for other words.
struct GroupSize {
  Granularity granularity = Granularity::group;
  int64_t size = 0;  // of Granularity::group
};
GroupSize parse_group_size(const std::string& text);

}  // namespace halfbyte::cli
